"""Advantages of a step's samples, from rewards, the KL penalty, lengths, baselines and values."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxrl.algorithms.advantages import (
    distill,
    dr_grpo,
    gae,
    gpg,
    grpo,
    grpo_passk,
    opo,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
    rloo,
    whiten,
)
from jaxrl.algorithms.choose import choose
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
      samples: the `n` samples of each prompt next to each other.
      rewards: float64 [len(samples)].
      penalties: KL penalty per response token (kl_in = "reward"). Group estimators subtract its sum
        from the reward of the response, token estimators subtract it at each token.
      baselines: float [len(samples)], reward of the greedy response to the same prompt (ReMax).

    Tokens outside the loss mask get the advantage 0. The estimators see the other tokens as if they
    were contiguous.
    """
    masks = [s.loss_mask for s in samples]
    lens = np.array([s.n_loss_tokens for s in samples])
    if penalties is not None:
        penalties = [p[mask] for p, mask in zip(penalties, masks, strict=True)]
    if cfg.advantage == "gae":
        return add_gae(samples, *token_rewards(lens, rewards, penalties), cfg)
    group_rewards = rewards.astype(np.float32)
    if penalties is not None:
        charged = group_rewards - np.array([float(p.sum()) for p in penalties])
        group_rewards = charged.astype(np.float32)
    groups, group_lens = group_rewards.reshape(-1, n), lens.reshape(-1, n)

    def per_token(rows: np.ndarray) -> list[np.ndarray]:
        return [row[:length] for row, length in zip(rows, lens, strict=True)]

    def per_response(advantages: np.ndarray) -> list[np.ndarray]:
        flat = advantages.reshape(-1).astype(np.float32)
        return [np.full(length, a, np.float32) for a, length in zip(flat, lens, strict=True)]

    def greedy_rewards() -> np.ndarray:
        assert baselines is not None
        return baselines[::n].astype(np.float32)

    by_std = cfg.norm_adv_by_std
    known = {
        "grpo": lambda: per_response(grpo(groups, norm_by_std=by_std)),
        "dr_grpo": lambda: per_response(dr_grpo(groups)),
        "rloo": lambda: per_response(rloo(groups)),
        "opo": lambda: per_response(opo(groups, group_lens)),
        "gpg": lambda: per_response(gpg(groups)),
        "grpo_passk": lambda: per_response(grpo_passk(groups, norm_by_std=by_std)),
        "remax": lambda: per_response(remax(groups, greedy_rewards())),
        "reinforce_plus_plus_baseline": lambda: per_response(
            reinforce_plus_plus_baseline(groups, group_lens)
        ),
        "reinforce_plus_plus": lambda: per_token(
            reinforce_plus_plus(*token_rewards(lens, rewards, penalties), gamma=cfg.gamma)
        ),
        "distill": lambda: per_token(
            distill(*token_rewards(lens, np.zeros(len(lens)), penalties), gamma=cfg.gamma)
        ),
    }
    advantages = choose(known, cfg.advantage, "algorithm.advantage")()
    return [
        dataclasses.replace(s, advantages=_scatter(a, mask))
        for s, a, mask in zip(samples, advantages, masks, strict=True)
    ]


def add_gae(
    samples: Sequence[TrainingSample], rewards: np.ndarray, mask: np.ndarray, cfg: AlgorithmConfig
) -> list[TrainingSample]:
    """Fills `advantages` by GAE, whitened over all tokens of the step, and `returns`."""
    values = np.zeros_like(mask)
    values[mask > 0] = np.concatenate([response_field(s, s.values)[s.loss_mask] for s in samples])
    advantages, returns = gae(rewards, values, mask, gamma=cfg.gamma, lam=cfg.lam)
    advantages = whiten(advantages, mask)

    def scattered(row: np.ndarray, s: TrainingSample) -> np.ndarray:
        return _scatter(row[: s.n_loss_tokens], s.loss_mask)

    return [
        dataclasses.replace(s, advantages=scattered(a, s), returns=scattered(g, s))
        for s, a, g in zip(samples, advantages, returns, strict=True)
    ]


def token_rewards(
    lens: np.ndarray, rewards: np.ndarray, penalties: Sequence[np.ndarray] | None
) -> tuple[np.ndarray, np.ndarray]:
    """(token rewards, mask), both float32 [N, T]: minus the penalty at every token, and the reward of
    the response added at its last token."""
    mask = (np.arange(max(lens.max(initial=1), 1)) < lens[:, None]).astype(np.float32)
    per_token = np.zeros(mask.shape, np.float64)
    if penalties is not None:
        per_token[mask > 0] = -np.concatenate(penalties)
    nonempty = lens > 0
    per_token[nonempty, lens[nonempty] - 1] += rewards[nonempty]
    return per_token.astype(np.float32), mask


def _scatter(values: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """float32 [len(mask)]: `values` in order where `mask` is true, 0 elsewhere."""
    out = np.zeros(len(mask), np.float32)
    out[mask] = values
    return out
