"""The samples of a prompt as a group: which groups can teach something, which prompts are solved."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxrl.algorithms.overlong import soft_overlong
from jaxrl.config import RunConfig
from jaxrl.types import Rollout


def groups_of(rollouts: Sequence[Rollout], n: int) -> list[list[Rollout]]:
    """The `n` samples of each prompt, which lie side by side."""
    return [list(rollouts[i : i + n]) for i in range(0, len(rollouts), n)]


def split_flat(
    groups: Sequence[list[Rollout]],
) -> tuple[list[list[Rollout]], list[list[Rollout]]]:
    """(groups whose rewards differ, groups of equal rewards)."""
    differ = [group for group in groups if len({r.reward for r in group}) > 1]
    return differ, [group for group in groups if len({r.reward for r in group}) == 1]


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
