"""Keys of the schedule: how generation and training alternate or overlap."""

import dataclasses
import math

from jaxrl.config.choices import GROUP_ORDERS, SCHEDULES
from jaxrl.config.schema import key


@dataclasses.dataclass(frozen=True)
class ScheduleConfig:
    mode: str = key(
        "sync",
        "sync = a step generates all of its responses, then trains on them. partial = more prompts "
        "are in flight than a step needs, and unfinished responses continue under the new weights",
        choices=SCHEDULES,
    )
    max_staleness: int = key(
        1,
        "partial: maximum age of a response in training steps, from the version of its first token "
        "to the step that trains on it; 0 gives the weights of sync",
        ge=0,
    )
    oversample: float = key(
        0.0,
        "partial: prompts in flight as a multiple of data.prompts_per_step; 0 = as many as "
        "max_staleness allows, which is 1 + max_staleness",
        ge=0,
    )
    keep_kv: bool = key(
        False,
        "partial: keep the KV of unfinished responses, which earlier weights computed, instead of "
        "computing it again under the new ones. After a validation, a ReMax baseline or a "
        "checkpoint it is computed again in any case",
    )
    order: str = key(
        "prompt",
        "partial: order in which groups are trained on. prompt = the order of the data, which is "
        "reproducible. arrival = groups that are generated and rewarded first, as far as no other "
        "becomes older than max_staleness",
        choices=GROUP_ORDERS,
    )

    def max_started(self, prompts_per_step: int) -> int:
        """Groups that may be in flight."""
        factor = self.oversample or 1 + self.max_staleness
        return math.ceil(factor * prompts_per_step)
