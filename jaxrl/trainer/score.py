"""Rewards of rollouts, through the reward pools of all processes."""

import dataclasses
from collections.abc import Sequence

from jaxrl.rewards.pool import RewardPool
from jaxrl.runtime.signals import StopFlag
from jaxrl.trainer.reward_model import RewardModel
from jaxrl.types import Rollout
from sharding import hosts


def score(
    pool: RewardPool,
    reward_model: RewardModel | None,
    rollouts: Sequence[Rollout],
    stop: StopFlag,
) -> list[Rollout]:
    """The rollouts with their rewards: each process scores its share by functions, all of them together by the
    reward model, and all get all of them."""
    mine = pool.score(rollouts[hosts.local_slice(len(rollouts))])
    stop.check()
    scores = hosts.gather_items([(r.reward, r.reward_parts, r.reward_error) for r in mine])
    found = [
        dataclasses.replace(r, reward=reward, reward_parts=parts, reward_error=error)
        for r, (reward, parts, error) in zip(rollouts, scores, strict=True)
    ]
    return found if reward_model is None else reward_model.add_rewards(found, stop.check)
