"""Advantages of a step's samples, from rewards, KL penalties, lengths, baselines and values."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from jaxrl.algorithms.advantages import ADVANTAGES, whiten
from jaxrl.algorithms.table import apply, lookup
from jaxrl.config.keys import AlgorithmConfig
from jaxrl.data.packing import response_field
from jaxrl.types import TrainingSample


def add_advantages(
    samples: Sequence[TrainingSample],
    rewards: np.ndarray,
    cfg: AlgorithmConfig,
    *,
    penalties: Sequence[np.ndarray] | None = None,
    baselines: np.ndarray | None = None,
) -> list[TrainingSample]:
    """Fills `advantages`; with a critic, also `returns`.

    Args:
      samples: at least one. With a critic, they have `values`. Groups may differ in size. The
        samples of one episode (`branch`) are one member of their group: its length and its KL
        penalty are their sums, and all get its advantage. Token-level estimators take each sample
        as a trajectory that ends with the reward of the episode.
      rewards: float64 [len(samples)], of the sample's episode.
      penalties: KL penalty per response token (kl_in = "reward"). Response-level estimators
        subtract its sum from the reward of the response; token-level ones subtract it per token.
      baselines: float [len(samples)], reward of the greedy response to the prompt (ReMax).

    Tokens outside the loss mask get advantage 0. The estimators see the remaining tokens as if
    they were contiguous.
    """
    row = lookup(ADVANTAGES, cfg.advantage, "algorithm.advantage")
    places = places_in_groups(samples)
    inputs = estimator_inputs(samples, rewards, places, penalties, baselines)
    result = apply(row, {name: inputs[name]() for name in row.inputs}, cfg)

    def fields(result: np.ndarray) -> list[np.ndarray]:
        rows = result if row.level == "token" else result[places][:, None]
        return [_scatter(x, s.loss_mask) for x, s in zip(rows, samples, strict=True)]

    if not row.needs_critic:
        return [
            dataclasses.replace(s, advantages=a)
            for s, a in zip(samples, fields(result), strict=True)
        ]
    advantages, returns = result
    advantages = whiten(advantages, inputs["mask"]())
    return [
        dataclasses.replace(s, advantages=a, returns=g)
        for s, a, g in zip(samples, fields(advantages), fields(returns), strict=True)
    ]


def places_in_groups(samples: Sequence[TrainingSample]) -> tuple[np.ndarray, np.ndarray]:
    """(group, index of its episode in the group) of each sample, int [N]: places in [P, n]."""
    groups = np.array([s.group for s in samples])
    _, first, group = np.unique(groups, return_index=True, return_inverse=True)
    episode = np.cumsum([s.branch == 0 for s in samples])
    return group, episode - episode[first][group]


def estimator_inputs(
    samples: Sequence[TrainingSample],
    rewards: np.ndarray,
    places: tuple[np.ndarray, np.ndarray],
    penalties: Sequence[np.ndarray] | None,
    baselines: np.ndarray | None,
) -> dict[str, Callable[[], np.ndarray]]:
    """Functions that compute the inputs that a row of `ADVANTAGES` can name.

    With P prompts, at most n samples per prompt, N samples in total, and T tokens of the loss mask:
      rewards [P, n]: rewards minus the KL penalties; NaN in a group of fewer than n samples.
      lengths [P, n]: number of tokens of the loss mask; 0 there.
      task_rewards, baselines [N]: rewards without KL penalties; greedy rewards.
      mask, values [N, T].
      token_kl_rewards [N, T]: minus the KL penalties.
      token_rewards [N, T]: the same, plus the rewards: `turn_rewards` of the sample at its tokens,
        and the rest of the response's reward at its last token.
    """
    lens = np.array([s.n_loss_tokens for s in samples])
    mask = (np.arange(max(lens.max(initial=1), 1)) < lens[:, None]).astype(np.float32)
    if penalties is not None:
        penalties = [p[s.loss_mask] for p, s in zip(penalties, samples, strict=True)]

    turns = [response_field(s, s.turn_rewards)[s.loss_mask] for s in samples]
    kl_rewards = np.zeros(mask.shape, np.float64)
    if penalties is not None:
        kl_rewards[mask > 0] = -np.concatenate(penalties)

    sizes = [int(index.max()) + 1 for index in places]

    def of_episodes(x: np.ndarray) -> np.ndarray:
        """The sum over the samples of each episode, [P, n]."""
        found = np.zeros(sizes, x.dtype)
        np.add.at(found, places, x)
        return found

    def group_rewards() -> np.ndarray:
        result = np.full(sizes, np.nan, np.float32)
        result[places] = rewards
        if penalties is not None:
            charged = of_episodes(np.array([float(p.sum()) for p in penalties]))
            result = (result - charged).astype(np.float32)
        return result

    def greedy_rewards() -> np.ndarray:
        assert baselines is not None
        return baselines.astype(np.float32)

    def values() -> np.ndarray:
        result = np.zeros_like(mask)
        fields = [response_field(s, s.values)[s.loss_mask] for s in samples]
        result[mask > 0] = np.concatenate(fields)
        return result

    return {
        "rewards": group_rewards,
        "lengths": lambda: of_episodes(lens),
        "task_rewards": lambda: rewards.astype(np.float32),
        "baselines": greedy_rewards,
        "token_rewards": lambda: token_rewards(kl_rewards, rewards, turns, mask),
        "token_kl_rewards": lambda: kl_rewards.astype(np.float32),
        "mask": lambda: mask,
        "values": values,
    }


def token_rewards(
    kl_rewards: np.ndarray, rewards: np.ndarray, turns: Sequence[np.ndarray], mask: np.ndarray
) -> np.ndarray:
    """float32 [N, T]: `kl_rewards`, the rewards of turns, and the rest of `rewards` at the last."""
    result = kl_rewards.copy()
    result[mask > 0] += np.concatenate(turns)
    for row, reward, turn in zip(result, rewards, turns, strict=True):
        if len(turn):
            row[len(turn) - 1] += reward - turn.sum(dtype=np.float64)
    return result.astype(np.float32)


def _scatter(values: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Writes one value, or the first values in order, to the true elements of `mask`; 0 elsewhere.

    Returns float32 [len(mask)].
    """
    out = np.zeros(len(mask), np.float32)
    out[mask] = values if len(values) == 1 else values[: mask.sum()]
    return out
