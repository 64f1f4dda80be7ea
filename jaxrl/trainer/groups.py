"""The samples of a prompt as a group: which groups can teach something, which prompts are solved."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxrl.algorithms.overlong import soft_overlong
from jaxrl.config.keys import RunConfig
from jaxrl.types import Rollout


def groups_of(rollouts: Sequence[Rollout], n: int) -> list[list[Rollout]]:
    """The `n` samples of each prompt, which lie side by side."""
    return [list(rollouts[i : i + n]) for i in range(0, len(rollouts), n)]


def split_flat(
    groups: Sequence[list[Rollout]], between: Sequence[float] = ()
) -> tuple[list[list[Rollout]], list[list[Rollout]]]:
    """(groups to learn from, the others: those of equal rewards, and with `between` = (low, high) those whose
    mean reward is not between the two)."""

    def teaches(group: list[Rollout]) -> bool:
        rewards = [r.reward for r in group]
        inside = not between or bool(between[0] < np.mean(rewards) < between[1])
        return inside and len(set(rewards)) > 1

    taught = [teaches(group) for group in groups]
    kept = [group for group, yes in zip(groups, taught, strict=True) if yes]
    return kept, [group for group, yes in zip(groups, taught, strict=True) if not yes]


def solved_prompts(groups: Sequence[list[Rollout]], pass_rate: float) -> list[int]:
    """Ids of the prompts whose mean reward is at least `pass_rate`, as the reward functions gave it."""
    return [g[0].prompt.id for g in groups if np.mean([r.reward for r in g]) >= pass_rate]


def punish_overlong(rollouts: Sequence[Rollout], cfg: RunConfig) -> list[Rollout]:
    """Adds reward.overlong_penalty times the soft overlong punishment (DAPO) to the rewards."""
    if not cfg.reward.overlong_buffer:
        return list(rollouts)
    punishment = cfg.reward.overlong_penalty * soft_overlong(
        np.array([len(r.tokens) for r in rollouts]),
        max_len=cfg.data.max_response_len,
        buffer_len=cfg.reward.overlong_buffer,
    )
    return [
        dataclasses.replace(
            r, reward=r.reward + p, reward_parts=r.reward_parts | {"overlong": float(p)}
        )
        for r, p in zip(rollouts, punishment.tolist(), strict=True)
    ]
