"""Rewards of a step: shaping, failed ones, their metrics, and the records of samples.jsonl."""

import collections
import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import rich
from rich.text import Text

from jaxrl.algorithms.advantages import ADVANTAGES
from jaxrl.algorithms.reward_shaping import length_penalty, soft_overlong, stop_properly
from jaxrl.algorithms.table import lookup
from jaxrl.config.keys import RewardConfig, RunConfig
from jaxrl.data.images.references import IMAGE
from jaxrl.data.iterator import PromptOutcome
from jaxrl.learner.reward_model import PART
from jaxrl.rewards.functions import metric_names
from jaxrl.rewards.pool import count_sums
from jaxrl.tracking.sample_images import image_name
from jaxrl.tracking.samples import printable
from jaxrl.trainer.phases.advantage import RewardParts
from jaxrl.types import ImageInput, Reward, Rollout, ScoredRollout
from sharding import hosts

MAX_WARNINGS = 10  # kinds of errors
MAX_CHARS = 300  # of an error in a message
_VARIABLE = re.compile(r"'[^']*'|\"[^\"]*\"|\d+")  # differs between errors of one kind
Group = list[ScoredRollout]  # samples of one prompt


def split_groups(rollouts: Sequence[ScoredRollout], n: int) -> list[Group]:
    """Splits the rollouts into groups of `n` adjacent samples, one group per prompt."""
    return [list(rollouts[i : i + n]) for i in range(0, len(rollouts), n)]


def valid_samples(rollouts: Sequence[ScoredRollout], cfg: RewardConfig) -> Group:
    """The rollouts whose reward counts.

    With reward.on_error="exclude" these are the ones without an error of the reward or the
    environment, with "value" all.
    """
    return [r for r in rollouts if cfg.on_error == "value" or not r.error]


def valid_groups(groups: Sequence[Group], cfg: RunConfig) -> list[Group]:
    """The valid samples of each group; none if they are too few for the estimator (1 or 2)."""
    row = lookup(ADVANTAGES, cfg.algorithm.advantage, "algorithm.advantage")
    needed = 2 if row.needs_group else 1
    valid = [valid_samples(group, cfg.reward) for group in groups]
    return [group if len(group) >= needed else [] for group in valid]


def split_flat(
    groups: Sequence[Group], mean_range: Sequence[float] = ()
) -> tuple[list[Group], list[Group]]:
    """(groups with a learning signal, groups without).

    A group has no signal if all its rewards are equal, or if its mean reward is outside the open
    interval `mean_range` = (low, high).
    """

    def has_signal(group: Group) -> bool:
        rewards = [r.reward.value for r in group]
        if len(set(rewards)) < 2:
            return False
        return not mean_range or bool(mean_range[0] < np.mean(rewards) < mean_range[1])

    signal = [has_signal(group) for group in groups]
    kept = [group for group, yes in zip(groups, signal, strict=True) if yes]
    return kept, [group for group, yes in zip(groups, signal, strict=True) if not yes]


def prompt_outcomes(groups: Sequence[Group]) -> list[PromptOutcome]:
    """Id and mean reward, before shaping, of each prompt with valid samples."""
    return [
        (group[0].rollout.prompt.id, float(np.mean([r.reward.value for r in group])))
        for group in groups
        if group
    ]


def add_length_penalties(rollouts: Sequence[ScoredRollout], cfg: RunConfig) -> list[ScoredRollout]:
    """The samples of one prompt with the configured penalties of length, in turn.

    They are reward.length_penalty times the pass rate and the relative length,
    reward.overlong_penalty times the soft overlong punishment (DAPO), and the change by
    reward.truncated_coef. The first compares the valid samples alone, and leaves others as they
    are.
    """
    if cfg.reward.length_penalty and (valid := valid_samples(rollouts, cfg.reward)):
        penalties = length_penalty(
            np.array([r.reward.value for r in valid], np.float64),
            np.array([r.rollout.n_loss_tokens for r in valid], np.int64),
            weight=cfg.reward.length_penalty,
        )
        changed = _with_penalties(valid, penalties, "length")
        places = {id(old): new for old, new in zip(valid, changed, strict=True)}
        rollouts = [places.get(id(r), r) for r in rollouts]
    if cfg.reward.overlong_buffer:
        penalties = cfg.reward.overlong_penalty * soft_overlong(
            np.array([len(r.rollout.tokens) for r in rollouts], np.int64),
            max_len=cfg.data.max_response_len,
            buffer_len=cfg.reward.overlong_buffer,
        )
        rollouts = _with_penalties(rollouts, penalties, "overlong")
    if cfg.reward.truncated_coef != 1.0:
        rewards = np.array([r.reward.value for r in rollouts], np.float64)
        truncated = np.array([r.rollout.finish == "length" for r in rollouts], bool)
        changed = stop_properly(rewards, truncated, coef=cfg.reward.truncated_coef)
        rollouts = _with_penalties(rollouts, changed - rewards, "truncated")
    return list(rollouts)


def _with_penalties(
    rollouts: Sequence[ScoredRollout], penalties: np.ndarray, part: str
) -> list[ScoredRollout]:
    """The rollouts with the penalties (0 or below) added to their rewards, as this part of them."""

    def penalized(reward: Reward, penalty: float) -> Reward:
        parts = reward.parts | {part: penalty}
        return dataclasses.replace(reward, value=reward.value + penalty, parts=parts)

    return [
        dataclasses.replace(r, reward=penalized(r.reward, p))
        for r, p in zip(rollouts, penalties.tolist(), strict=True)
    ]


def reward_parts(
    rollouts: Sequence[ScoredRollout], n_samples: Sequence[int], cfg: RunConfig
) -> RewardParts:
    """The rewards whose weighted sum is that of each rollout, for its `n_samples` samples.

    They are those of the functions, of the reward model and of the overlong penalty.
    """
    functions = metric_names(cfg.reward.functions)
    weights = dict(zip(functions, cfg.reward.weights or (1.0,) * len(functions), strict=True))
    if cfg.reward_model.path:
        weights[PART] = cfg.reward_model.weight
    if cfg.reward.overlong_buffer:
        weights["overlong"] = cfg.reward.overlong_penalty
    values = [[r.reward.parts.get(name, math.nan) for name in weights] for r in rollouts]
    return RewardParts(
        np.repeat(np.array(values), n_samples, axis=0), np.array([*weights.values()])
    )


@dataclasses.dataclass(frozen=True)
class RewardScale:
    """Running mean and standard deviation of all rewards; saved in the checkpoint."""

    n: int = 0
    mean: float = 0.0
    squares: float = 0.0  # sum of (reward - mean)²

    def updated(self, rollouts: Sequence[ScoredRollout]) -> "RewardScale":
        """The moments including the rewards of a step, except for failed samples."""
        return self.including(np.array([r.reward.value for r in rollouts if not r.error]))

    def including(self, new: np.ndarray) -> "RewardScale":
        """The moments including these rewards [n].

        Combines both sets by Chan, Golub and LeVeque (1979), eq. 2.1:
        M = M_a + M_b + δ² n_a n_b / n.
        """
        new = new.astype(np.float64)
        if not len(new):
            return self
        n, delta = self.n + len(new), float(new.mean()) - self.mean
        squares = float(((new - new.mean()) ** 2).sum()) + delta**2 * self.n * len(new) / n
        return RewardScale(n, self.mean + delta * len(new) / n, self.squares + squares)

    @property
    def std(self) -> float:
        """The standard deviation, or 1 if all rewards are equal."""
        return math.sqrt(self.squares / self.n) if self.squares > 0 else 1.0


def scaled_rewards(rewards: np.ndarray, scale: RewardScale, cfg: RewardConfig) -> np.ndarray:
    """The rewards for the advantage computation, float64.

    reward.normalize gives (reward - mean) / std. Then reward.clip clips to its range.
    """
    if cfg.normalize:
        rewards = (rewards - scale.mean) / scale.std
    if cfg.clip:
        low, high = cfg.clip
        rewards = np.clip(rewards, low, high)
    return rewards


def turn_rewards(scored: ScoredRollout, scale: RewardScale, cfg: RunConfig) -> np.ndarray | None:
    """The part of the scaled reward that each response token ends a turn or step with.

    It is the environment's reward for the turn, times the weight of the reward function
    "environment", and the reward model's for the step, times reward_model.weight; divided by the
    standard deviation with reward.normalize. [response_len]; None without such rewards, and for a
    failed one.
    """
    episode, reward = scored.rollout.episode, cfg.reward
    named = zip(reward.functions, reward.weights or (1.0,) * len(reward.functions), strict=True)
    weight = sum(w for name, w in named if name.partition("?")[0] == "environment")
    parts = [] if episode is None or not weight else [(weight, episode.step_rewards)]
    if steps := scored.reward.step_rewards:
        parts.append((cfg.reward_model.weight, steps))
    if scored.error or not parts:
        return None
    found = np.zeros(len(scored.rollout.tokens), np.float32)
    for weight, rewards in parts:
        factor = weight / scale.std if reward.normalize else weight
        for end, value in rewards:
            found[end - 1] += factor * value
    return found


def scale_metrics(rewards: np.ndarray, scale: RewardScale, cfg: RewardConfig) -> dict[str, float]:
    """Metrics of `scaled_rewards`.

    reward/running_mean and reward/running_std with reward.normalize, reward/clip_fraction with
    reward.clip.
    """
    metrics = {}
    if cfg.normalize:
        metrics = {"reward/running_mean": scale.mean, "reward/running_std": scale.std}
    if cfg.clip:
        low, high = cfg.clip
        unclipped = scaled_rewards(rewards, scale, dataclasses.replace(cfg, clip=()))
        metrics["reward/clip_fraction"] = float(np.mean((unclipped < low) | (unclipped > high)))
    return metrics


class RewardsFailed(hosts.AgreedError):
    """More than reward.max_error_fraction of the responses of a step have no valid reward."""


class RewardErrors:
    """Looks for failed rewards and environments in each set of responses.

    `in_file`: whether the run writes samples.jsonl, to which warnings then point.
    """

    def __init__(self, max_fraction: float, *, in_file: bool = True):
        self.max_fraction = max_fraction
        self._hint = "More in samples.jsonl; each" if in_file else "Each"
        self._kinds: set[str] = set()

    def warn(self, rollouts: Sequence[ScoredRollout], where: str) -> list[str]:
        """Prints a warning if there is a new kind of error. Returns all errors.

        Args:
          where: for the message, as in "step 3".
        """
        failed = [r for r in rollouts if r.error]
        errors = [r.error for r in failed]
        new = [r for r in failed if kind_of(r.error) not in self._kinds]
        if new and len(self._kinds) < MAX_WARNINGS:
            headline, details = describe(new[0])
            text = (
                f"warning: {where}: {failures(errors, len(rollouts))}. First error: {headline}. "
                f"{self._hint} kind of error is reported once{details}"
            )
            self._kinds |= {kind_of(r.error) for r in new}
            if hosts.is_main_process():
                rich.get_console().print(Text(text, "bold yellow"), soft_wrap=True)
        return errors

    def check(self, rollouts: Sequence[ScoredRollout], where: str) -> None:
        """Warns, and raises RewardsFailed if more than the allowed fraction has failed."""
        errors = self.warn(rollouts, where)
        if len(errors) > self.max_fraction * len(rollouts):
            headline, details = describe(next(r for r in rollouts if r.error))
            raise RewardsFailed(
                f"{where}: {failures(errors, len(rollouts))}, more than "
                f"config.reward.max_error_fraction={self.max_fraction:g} allows. First error: "
                f"{headline}. Correct the reward function, the environment or the data, then "
                "resume the run; or set config.reward.max_error_fraction=1.0 to train on the other "
                f"responses (see config.reward.on_error){details}"
            )


def describe(failed: ScoredRollout) -> tuple[str, str]:
    """The error of a response in one line; lines with its user code, its response and its row."""
    headline, _, frames = failed.error.partition("\n")
    rollout, prompt = failed.rollout, failed.rollout.prompt
    response = rollout.text[:MAX_CHARS] + ("..." if len(rollout.text) > MAX_CHARS else "")
    columns = f"; extra_info: {', '.join(map(str, prompt.extra))}" if prompt.extra else ""
    row = f"data_source {prompt.source!r}, answer {prompt.answer_text[:MAX_CHARS]!r}{columns}"
    details = [
        *filter(None, [frames]),
        f"  response: {response!r}",
        f"  row {prompt.id + 1} of the data: {row}",
    ]
    return printable(headline, MAX_CHARS), "".join(f"\n{printable(one, 2000)}" for one in details)


def kind_of(error: str) -> str:
    """The error without the numbers and quoted texts that differ from response to response."""
    return _VARIABLE.sub("*", error)


def failures(errors: Sequence[str], n: int) -> str:
    return f"the rewards of {len(errors)} of {n} responses failed"


def reward_metrics(rollouts: Sequence[ScoredRollout], cfg: RewardConfig) -> dict[str, float]:
    """reward/*, env/* and the lengths of the rollouts of a step.

    Means and deviations of rewards are over valid rewards; absent if there are none.
    """
    valid = valid_samples(rollouts, cfg)
    sampled, means = [s for r in rollouts for s in r.rollout.sequences], {}
    counts = count_sums(r.reward for r in rollouts)
    if valid:
        rewards = np.array([r.reward.value for r in valid])
        means = {"reward/mean": float(rewards.mean()), "reward/std": float(rewards.std())}
    return means | {
        "reward/errors": float(sum(bool(r.error) for r in rollouts)),
        **{f"reward/{name}": mean for name, mean in part_means(valid).items()},
        **{f"reward/{name}": total for name, total in counts.items()},
        **{f"env/{name}": value for name, value in episode_means(rollouts).items()},
        "rollout/entropy": sampling_entropy(sampled),
        "rollout/response_len": float(np.mean([len(r.tokens) for r in sampled])),
        "rollout/prompt_len": float(np.mean([len(r.prompt.tokens) for r in sampled])),
        "rollout/truncated_fraction": float(np.mean([r.finish == "length" for r in sampled])),
    }


def sampling_entropy(rollouts: Sequence[Rollout]) -> float:
    """Mean of -log p of the sampled tokens, an unbiased estimate of the sampling entropy, nats."""
    logps = [r.logp if r.behavior_logp is None else r.behavior_logp for r in rollouts]
    n_tokens = max(sum(r.n_loss_tokens for r in rollouts), 1)
    pairs = zip(logps, rollouts, strict=True)
    return -float(sum(logp[r.loss_mask].sum(dtype=np.float64) for logp, r in pairs) / n_tokens)


def part_means(rollouts: Sequence[ScoredRollout]) -> dict[str, float]:
    """Mean of each part of the rewards, over the rollouts whose reward has that part."""
    parts = collections.defaultdict(list)
    for r in rollouts:
        for name, value in r.reward.parts.items():
            parts[name].append(value)
    return {name: float(np.mean(values)) for name, values in parts.items()}


def episode_means(rollouts: Sequence[ScoredRollout]) -> dict[str, float]:
    """Metrics of episodes; {} for rollouts without an environment.

    turns: mean number of turns. own_fraction: fraction of the response tokens that the model
    sampled. failures: number of failed environments. Other keys: means of the counts that the
    environment reports.
    """
    sampled = [r.rollout for r in rollouts]
    episodes = [r.episode for r in sampled if r.episode is not None]
    if not episodes:
        return {}
    names = sorted({name for e in episodes for name in e.counts})
    counts = {name: float(np.mean([e.counts.get(name, 0.0) for e in episodes])) for name in names}
    sequences = [s for r in sampled for s in r.sequences]
    n_tokens = sum(len(s.tokens) for s in sequences)
    return counts | {
        "turns": float(np.mean([e.n_turns for e in episodes])),
        "own_fraction": sum(s.n_loss_tokens for s in sequences) / max(n_tokens, 1),
        "failures": float(sum(bool(e.error) for e in episodes)),
    }


def sample_records(
    rollouts: Sequence[ScoredRollout],
    *,
    kind: str,
    trajectories: Mapping[int, dict[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """JSON-serializable records for samples.jsonl and the report, one per rollout.

    `trajectories` of some of them, by index, are their field "trajectory".
    """
    records = [_sample_record(r, kind) for r in rollouts]
    for i, trajectory in (trajectories or {}).items():
        records[i]["trajectory"] = trajectory
    return records


def images_of(scored: Sequence[ScoredRollout]) -> list[ImageInput]:
    """The images of prompts and episodes."""
    return [placed.image for one in scored for placed in one.rollout.images]


def _sample_record(scored: ScoredRollout, kind: str) -> dict[str, Any]:
    rollout, prompt = scored.rollout, scored.rollout.prompt
    question = (rollout.prompt_messages or prompt.messages)[-1]["content"]
    images = [image_name(placed.image) for placed in rollout.images]
    return {
        "kind": kind,
        "prompt_id": prompt.id,
        "sample": rollout.sample,
        "source": prompt.source,
        "prompt": question.replace(IMAGE, "<image>") if images else question,
        **({"images": images} if images else {}),
        "completion": rollout.text,
        "answer": prompt.answer_text,
        "reward": scored.reward.value,
        "finish": rollout.finish,
        "error": scored.error,
    }
