"""Running means of the rewards of roles, the baselines of role-conditioned advantages."""

import collections
import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from jaxrl.algorithms.role_advantages import role_of, updated_baseline
from jaxrl.types import TrainingSample

Baselines = Mapping[str, float]  # by data source and role; in checkpoints


def with_role_baselines(
    samples: Sequence[TrainingSample], baselines: Baselines, decay: float
) -> tuple[list[TrainingSample], Baselines]:
    """(samples with the baselines before the step, baselines that include their rewards)."""
    keys = [f"{s.source}:{role_of(s.role)}" for s in samples]
    rewards = collections.defaultdict(list)
    for key, s in zip(keys, samples, strict=True):
        rewards[key].append(s.role_reward)
    updated = {
        key: updated_baseline(baselines.get(key, 0.0), np.array(found, np.float64), decay)
        for key, found in rewards.items()
    }
    filled = [
        dataclasses.replace(s, role_baseline=baselines.get(key, 0.0))
        for key, s in zip(keys, samples, strict=True)
    ]
    return filled, {**baselines, **updated}
