"""Fills the advantages of a step's rollouts: from rewards, the KL in the reward, lengths, baselines and values."""

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
from jaxrl.types import Rollout


def add_advantages(
    rollouts: Sequence[Rollout],
    cfg: AlgorithmConfig,
    n: int,
    penalties: Sequence[np.ndarray] | None = None,
) -> list[Rollout]:
    """The rollouts with `advantages`, one number per token; with a critic, whose `values` they have, also
    with `returns`. The `n` samples of a prompt lie side by side.

    `penalties` holds what each token is charged (kl_in = "reward"). An estimator of groups subtracts their
    sum from the response's reward, one of tokens gives each token its own. Tokens that the model did not write have
    the advantage 0, and those that it wrote are taken as if no others stood between them.
    """
    own = [r.own_mask for r in rollouts]
    rollouts, whole = _written(rollouts), rollouts
    if penalties is not None:
        penalties = [p[o] for p, o in zip(penalties, own, strict=True)]
    if cfg.advantage == "gae":
        return with_returns(whole, *spread(rollouts, penalties), cfg)
    lens = np.array([len(r.tokens) for r in rollouts])
    rewards = np.array([r.reward for r in rollouts], np.float32)
    if penalties is not None:
        charged = rewards - np.array([float(p.sum()) for p in penalties])
        rewards = charged.astype(np.float32)
    groups, group_lens = rewards.reshape(-1, n), lens.reshape(-1, n)

    def per_token(rows: np.ndarray) -> list[np.ndarray]:
        return [row[:length] for row, length in zip(rows, lens, strict=True)]

    def per_response(advantages: np.ndarray) -> list[np.ndarray]:
        flat = advantages.reshape(-1).astype(np.float32)
        return [np.full(length, a, np.float32) for a, length in zip(flat, lens, strict=True)]

    by_std = cfg.norm_adv_by_std
    known = {
        "grpo": lambda: per_response(grpo(groups, norm_by_std=by_std)),
        "dr_grpo": lambda: per_response(dr_grpo(groups)),
        "rloo": lambda: per_response(rloo(groups)),
        "opo": lambda: per_response(opo(groups, group_lens)),
        "gpg": lambda: per_response(gpg(groups)),
        "grpo_passk": lambda: per_response(grpo_passk(groups, norm_by_std=by_std)),
        "remax": lambda: per_response(remax(groups, baselines(rollouts, n))),
        "reinforce_plus_plus_baseline": lambda: per_response(
            reinforce_plus_plus_baseline(groups, group_lens)
        ),
        "reinforce_plus_plus": lambda: per_token(
            reinforce_plus_plus(*spread(rollouts, penalties), gamma=cfg.gamma)
        ),
        "distill": lambda: per_token(
            distill(*spread(unrewarded(rollouts), penalties), gamma=cfg.gamma)
        ),
    }
    advantages = choose(known, cfg.advantage, "algorithm.advantage")()
    return [
        dataclasses.replace(r, advantages=_placed(a, o))
        for r, a, o in zip(whole, advantages, own, strict=True)
    ]


def unrewarded(rollouts: Sequence[Rollout]) -> list[Rollout]:
    return [dataclasses.replace(r, reward=0.0) for r in rollouts]


def _written(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """The rollouts with the tokens that the model wrote alone."""
    return [dataclasses.replace(r, tokens=r.tokens[r.own_mask]) for r in rollouts]


def _placed(values: np.ndarray, own: np.ndarray) -> np.ndarray:
    """float32, `values` where `own` is true, in order, and 0 elsewhere."""
    out = np.zeros(len(own), np.float32)
    out[own] = values
    return out


def with_returns(
    rollouts: Sequence[Rollout], token_rewards: np.ndarray, mask: np.ndarray, cfg: AlgorithmConfig
) -> list[Rollout]:
    """The rollouts with the advantages of GAE, whitened over all tokens of the step, and the returns that their
    values are to become."""
    values = np.zeros_like(mask)
    values[mask > 0] = np.concatenate([response_field(r, r.values)[r.own_mask] for r in rollouts])
    advantages, returns = gae(token_rewards, values, mask, gamma=cfg.gamma, lam=cfg.lam)
    advantages = whiten(advantages, mask)

    def placed(row: np.ndarray, r: Rollout) -> np.ndarray:
        return _placed(row[: r.n_own], r.own_mask)

    return [
        dataclasses.replace(r, advantages=placed(a, r), returns=placed(g, r))
        for r, a, g in zip(rollouts, advantages, returns, strict=True)
    ]


def baselines(rollouts: Sequence[Rollout], n: int) -> np.ndarray:
    """The greedy response's reward of each prompt."""
    return np.array([r.baseline for r in rollouts[::n]], np.float32)


def spread(
    rollouts: Sequence[Rollout], penalties: Sequence[np.ndarray] | None
) -> tuple[np.ndarray, np.ndarray]:
    """(rewards, mask) per token, one row per response: minus its penalty at each token, the response's
    reward at the last."""
    lens = np.array([len(r.tokens) for r in rollouts])
    mask = (np.arange(max(lens.max(initial=1), 1)) < lens[:, None]).astype(np.float32)
    token_rewards = np.zeros(mask.shape, np.float64)
    if penalties is not None:
        token_rewards[mask > 0] = -np.concatenate(penalties)
    rewards = np.array([r.reward for r in rollouts])
    answered = lens > 0
    token_rewards[answered, lens[answered] - 1] += rewards[answered]
    return token_rewards.astype(np.float32), mask
