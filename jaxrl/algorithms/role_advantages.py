"""Advantage estimators of conversations with roles: N conversations, each with its own reward.

A role is the part of a conversation's name before "/": "solver/0" and "solver/1" are solvers.
"""

import numpy as np
from jaxtyping import Float, Int

RoleValues = Float[np.ndarray, " N"]
RoleTokens = Float[np.ndarray, "N T"]


def role_of(name: str) -> str:
    """The role of a conversation by its name."""
    return name.partition("/")[0]


def rae(role_rewards: RoleValues, role_baselines: RoleValues, mask: RoleTokens) -> RoleTokens:
    """A = r - b with b the running mean of the rewards of the conversation's role.

    Role-conditioned advantage estimation, SPIRAL (https://arxiv.org/abs/2506.24119): in a zero-sum
    game the mean over both players is 0 whatever they do. b is the one before the step.
    """
    advantages = role_rewards.astype(np.float64) - role_baselines
    return (advantages[:, None] * mask).astype(np.float32)


def updated_baseline(baseline: float, rewards: np.ndarray, decay: float) -> float:
    """b = α^m b + (1 - α^m) mean(r) of m rewards: as m updates b = α b + (1 - α) r by their mean.

    So it does not depend on their order. α is `decay`.
    """
    kept = decay ** len(rewards)
    return kept * baseline + (1.0 - kept) * float(np.mean(rewards))


def hierarchical_grpo(
    role_rewards: RoleValues,
    places: tuple[Int[np.ndarray, " N"], Int[np.ndarray, " N"]],
    roles: tuple[str, ...],
    mask: RoleTokens,
    *,
    episode_roles: tuple[str, ...],
) -> RoleTokens:
    """A = r - mean(r) over the conversations of one role, in an episode or in the whole group.

    Roles of `episode_roles` are compared within their episode, such as the solvers of one proposed
    problem; all others over the episodes of the prompt. `places` are (group, episode). A
    conversation without another one to compare with gets 0. prime-rl's hierarchical_grpo.
    """
    names = [role_of(name) for name in roles]
    cohorts = [
        (group, name, episode if name in episode_roles else -1)
        for name, group, episode in zip(names, *(x.tolist() for x in places), strict=True)
    ]
    numbers = {cohort: i for i, cohort in enumerate(dict.fromkeys(cohorts))}
    index = np.array([numbers[cohort] for cohort in cohorts])
    r = role_rewards.astype(np.float64)
    lowest = np.full(len(numbers), np.inf)
    np.minimum.at(lowest, index, r)
    relative = r - lowest[index]  # so that equal rewards cancel exactly
    mean = np.bincount(index, relative) / np.bincount(index)
    return ((relative - mean[index])[:, None] * mask).astype(np.float32)
