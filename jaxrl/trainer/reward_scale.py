"""The scale of the rewards that a run learns from: their running mean and deviation, and a range."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from jaxrl.config.keys import RewardConfig
from jaxrl.types import Rollout


@dataclasses.dataclass(frozen=True)
class RewardScale:
    """Moments of all rewards so far: a part of the run's state, saved with it."""

    n: int = 0
    mean: float = 0.0
    squares: float = 0.0  # sum of (reward - mean)²

    def after(self, rollouts: Sequence[Rollout]) -> "RewardScale":
        """With the rewards of a step; those that only say that a function failed do not count.

        Sets are joined as by Chan, Golub and LeVeque (1979), eq. 2.1: M = M_a + M_b + δ² n_a n_b / n.
        """
        new = np.array([r.reward for r in rollouts if not r.reward_error], np.float64)
        if not len(new):
            return self
        n, delta = self.n + len(new), float(new.mean()) - self.mean
        squares = float(((new - new.mean()) ** 2).sum()) + delta**2 * self.n * len(new) / n
        return RewardScale(n, self.mean + delta * len(new) / n, self.squares + squares)

    @property
    def std(self) -> float:
        """1 as long as all rewards were the same."""
        return math.sqrt(self.squares / self.n) if self.squares > 0 else 1.0


def rescaled(
    rollouts: Sequence[Rollout], scale: RewardScale, cfg: RewardConfig
) -> tuple[list[Rollout], dict[str, float]]:
    """(the rollouts with the rewards and baselines that advantages are made of, metrics of the scale).

    reward.normalize makes them (reward - mean) / std, reward.clip then cuts them to its range.
    """
    mean, std = (scale.mean, scale.std) if cfg.normalize else (0.0, 1.0)
    low, high = cfg.clip or (-math.inf, math.inf)
    metrics = {"reward/running_mean": mean, "reward/running_std": std} if cfg.normalize else {}
    if cfg.clip:
        outside = [not low <= (r.reward - mean) / std <= high for r in rollouts]
        metrics["reward/clip_fraction"] = float(np.mean(outside))

    def scaled(reward: float) -> float:
        return min(max((reward - mean) / std, low), high)

    found = [
        dataclasses.replace(r, reward=scaled(r.reward), baseline=scaled(r.baseline))
        for r in rollouts
    ]
    return found, metrics
