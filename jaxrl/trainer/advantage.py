"""Advantages of a step's samples, from rewards, the KL penalty, lengths, baselines and values."""

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
    n: int,
    *,
    penalties: Sequence[np.ndarray] | None = None,
    baselines: np.ndarray | None = None,
) -> list[TrainingSample]:
    """Fills `advantages`, and with a critic also `returns`.

    Args:
      samples: the `n` samples of each prompt next to each other; with a critic they have `values`.
      rewards: float64 [len(samples)].
      penalties: KL penalty per response token (kl_in = "reward"). Response-level estimators
        subtract its sum from the reward of the response, token-level ones subtract it at each token.
      baselines: float [len(samples)], reward of the greedy response to the same prompt (ReMax).

    Tokens outside the loss mask get the advantage 0. The estimators see the other tokens as if they
    were contiguous.
    """
    row = lookup(ADVANTAGES, cfg.advantage, "algorithm.advantage")
    inputs = estimator_inputs(samples, rewards, n, penalties, baselines)
    result = apply(row, {name: inputs[name]() for name in row.inputs}, cfg)

    def fields(result: np.ndarray) -> list[np.ndarray]:
        rows = result if row.level == "token" else result.reshape(-1, 1)
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


def estimator_inputs(
    samples: Sequence[TrainingSample],
    rewards: np.ndarray,
    n: int,
    penalties: Sequence[np.ndarray] | None,
    baselines: np.ndarray | None,
) -> dict[str, Callable[[], np.ndarray]]:
    """Every input that a row of `ADVANTAGES` can name, as a function that computes it.

    [P, n]: `rewards` minus the KL penalties, and `lengths` in tokens of the loss mask. [P]:
    `baselines`. [N, T] over the tokens of the loss mask: `mask`, `values`, `token_kl_rewards`
    (minus the penalties) and `token_rewards`, which also have the response's reward at its last
    token.
    """
    lens = np.array([s.n_loss_tokens for s in samples])
    mask = (np.arange(max(lens.max(initial=1), 1)) < lens[:, None]).astype(np.float32)
    if penalties is not None:
        penalties = [p[s.loss_mask] for p, s in zip(penalties, samples, strict=True)]

    def group_rewards() -> np.ndarray:
        result = rewards.astype(np.float32)
        if penalties is not None:
            charged = result - np.array([float(p.sum()) for p in penalties])
            result = charged.astype(np.float32)
        return result.reshape(-1, n)

    def greedy_rewards() -> np.ndarray:
        assert baselines is not None
        return baselines[::n].astype(np.float32)

    def values() -> np.ndarray:
        result = np.zeros_like(mask)
        fields = [response_field(s, s.values)[s.loss_mask] for s in samples]
        result[mask > 0] = np.concatenate(fields)
        return result

    return {
        "rewards": group_rewards,
        "lengths": lambda: lens.reshape(-1, n),
        "baselines": greedy_rewards,
        "token_rewards": lambda: token_rewards(rewards, lens, mask, penalties),
        "token_kl_rewards": lambda: token_rewards(np.zeros(len(lens)), lens, mask, penalties),
        "mask": lambda: mask,
        "values": values,
    }


def token_rewards(
    rewards: np.ndarray, lens: np.ndarray, mask: np.ndarray, penalties: Sequence[np.ndarray] | None
) -> np.ndarray:
    """float32 [N, T]: minus the penalty at every token, plus the reward at the last token."""
    result = np.zeros(mask.shape, np.float64)
    if penalties is not None:
        result[mask > 0] = -np.concatenate(penalties)
    nonempty = lens > 0
    result[nonempty, lens[nonempty] - 1] += rewards[nonempty]
    return result.astype(np.float32)


def _scatter(values: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """float32 [len(mask)]: one value, or the first ones in order, where `mask` is true; else 0."""
    out = np.zeros(len(mask), np.float32)
    out[mask] = values if len(values) == 1 else values[: mask.sum()]
    return out
