"""Staged lengths: the maximum response length of training grows from stage to stage.

Short responses first save most of the rollout's time while they still hold what the policy learns;
DeepScaleR trains with 8k, 16k and 24k tokens so, and Skywork-OR1 (https://arxiv.org/abs/2505.22312,
section 3.2.2) compares stages with the full length from the start.
"""

import dataclasses
from collections.abc import Mapping

from jaxrl.config.keys import DataConfig
from jaxrl.data.running_mean import running_mean


@dataclasses.dataclass(frozen=True)
class LengthStage:
    """The current stage, and what has been measured in it."""

    stage: int = 0
    n_steps: int = 0  # in this stage
    truncated: float = 0.0  # running mean of the truncated share
    reward: float = 0.0  # running mean of the mean reward

    def max_response_len(self, data: DataConfig) -> int:
        """The longest response of the next step, in tokens."""
        return (*data.length_stages, data.max_response_len)[self.stage]

    def after_step(self, metrics: Mapping[str, float], data: DataConfig) -> "LengthStage":
        """The stage after a step with these metrics.

        A stage ends after data.length_steps steps, and not before the running means of its steps
        have reached data.length_truncated and data.length_reward, if these are set.
        """
        if self.stage == len(data.length_stages):
            return self
        measured = dataclasses.replace(
            self,
            n_steps=self.n_steps + 1,
            truncated=self._mean(self.truncated, metrics["rollout/truncated_fraction"], data),
            reward=self._mean(self.reward, metrics["reward/mean"], data),
        )
        ends = (
            measured.n_steps >= data.length_steps
            and measured.truncated >= data.length_truncated
            and (not data.length_reward or measured.reward >= data.length_reward)
        )
        return LengthStage(self.stage + 1) if ends else measured

    def metrics(self, data: DataConfig) -> dict[str, float]:
        """The limit of the step's responses; {} without stages."""
        found = {"data/max_response_len": float(self.max_response_len(data))}
        return found if data.length_stages else {}

    def _mean(self, old: float, new: float, data: DataConfig) -> float:
        return running_mean(old if self.n_steps else None, new, data.length_memory)
