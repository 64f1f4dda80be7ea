"""What is said of rewarded rollouts: the statistics of an evaluation, the metrics of a step, the samples."""

import collections
from collections.abc import Sequence

import numpy as np

from jaxrl.algorithms.estimates import pass_at_k, standard_error
from jaxrl.config.keys import EvalConfig
from jaxrl.trainer.groups import groups_of
from jaxrl.types import Rollout


def statistics(rollouts: Sequence[Rollout], cfg: EvalConfig) -> dict[str, float]:
    """reward and pass_at_<k> with their standard errors (<name>_stderr; none of one prompt), the mean of each
    reward function (reward/<function>), response_len, truncated_fraction, errors (a count), and env/<name> of
    episodes.

    The cfg.n samples of each prompt lie side by side. A sample passes with a reward of cfg.pass_reward.
    """
    groups = groups_of(rollouts, cfg.n)
    rewards = np.array([[r.reward for r in group] for group in groups])  # [prompts, n]
    n_passed = (rewards >= cfg.pass_reward).sum(axis=1)
    by_prompt = {"reward": rewards.mean(axis=1)}
    by_prompt |= {f"pass_at_{k}": pass_at_k(n_passed, n=cfg.n, k=k) for k in cfg.k}
    found = {}
    for name, values in by_prompt.items():
        found[name] = float(values.mean())
        if len(groups) > 1:
            found[f"{name}_stderr"] = standard_error(values)
    return found | {
        **{f"reward/{name}": mean for name, mean in part_means(rollouts).items()},
        "response_len": float(np.mean([len(r.tokens) for r in rollouts])),
        "truncated_fraction": float(np.mean([r.finish == "length" for r in rollouts])),
        "errors": float(sum(bool(r.reward_error) for r in rollouts)),
        **{f"env/{name}": value for name, value in episode_means(rollouts).items()},
    }


def by_source(rollouts: Sequence[Rollout]) -> dict[str, list[Rollout]]:
    """The rollouts of each data source, sources by name."""
    found = collections.defaultdict(list)
    for r in rollouts:
        found[r.prompt.source].append(r)
    return dict(sorted(found.items()))


def validation_metrics(rollouts: Sequence[Rollout], cfg: EvalConfig) -> dict[str, float]:
    """The statistics as val/<name>, and where there are several data sources val/<source>/<name> of each."""
    metrics = {f"val/{name}": value for name, value in statistics(rollouts, cfg).items()}
    sources = by_source(rollouts)
    if len(sources) > 1:
        for source, own in sources.items():
            found = statistics(own, cfg).items()
            metrics |= {f"val/{source}/{name}": value for name, value in found}
    return metrics


def episode_means(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Of rollouts in an environment: turns, what the environment counted, the share of the tokens that the model wrote
    (own_fraction), and how many environments failed (failures). {} of others."""
    episodes = [r.episode for r in rollouts if r.episode is not None]
    if not episodes:
        return {}
    names = sorted({name for e in episodes for name in e.counts})
    counts = {name: float(np.mean([e.counts.get(name, 0.0) for e in episodes])) for name in names}
    n_tokens = sum(len(r.tokens) for r in rollouts)
    return counts | {
        "turns": float(np.mean([e.n_turns for e in episodes])),
        "own_fraction": sum(r.n_own for r in rollouts) / max(n_tokens, 1),
        "failures": float(sum(bool(e.error) for e in episodes)),
    }


def part_means(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """The mean of each number that the reward functions gave, over the rollouts for which they did."""
    parts = collections.defaultdict(list)
    for r in rollouts:
        for name, value in r.reward_parts.items():
            parts[name].append(value)
    return {name: float(np.mean(values)) for name, values in parts.items()}


def reward_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """reward/* and the lengths of a step's rollouts."""
    rewards = np.array([r.reward for r in rollouts])
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/errors": float(sum(bool(r.reward_error) for r in rollouts)),
        **{f"reward/{name}": mean for name, mean in part_means(rollouts).items()},
        **{f"env/{name}": value for name, value in episode_means(rollouts).items()},
        "rollout/response_len": float(np.mean([len(r.tokens) for r in rollouts])),
        "rollout/prompt_len": float(np.mean([len(r.prompt.tokens) for r in rollouts])),
        "rollout/truncated_fraction": float(np.mean([r.finish == "length" for r in rollouts])),
    }


def sample_records(rollouts: Sequence[Rollout], *, kind: str) -> list[dict]:
    """One JSON-able record a rollout, for samples.jsonl and the report."""
    return [
        {
            "kind": kind,
            "prompt_id": r.prompt.id,
            "sample": r.sample,
            "source": r.prompt.source,
            "prompt": (r.asked or r.prompt.messages)[-1]["content"],
            "completion": r.text,
            "answer": r.prompt.answer,
            "reward": r.reward,
            "finish": r.finish,
            "error": r.reward_error,
        }
        for r in rollouts
    ]
