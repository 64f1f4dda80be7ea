"""Keys of the schedule: how generation and training alternate or overlap."""

import dataclasses
import math

from jaxrl.config.choices import GROUP_ORDERS, SCHEDULES, WEIGHT_TRANSFERS
from jaxrl.config.schema import key


@dataclasses.dataclass(frozen=True)
class ScheduleConfig:
    mode: str = key(
        "sync",
        "sync = a step generates all of its responses, then trains on them. partial = more prompts "
        "are in flight than a step needs, and unfinished responses continue under the new weights. "
        "async = the same, on separate devices: they generate the next batch during training",
        choices=SCHEDULES,
    )
    max_staleness: int = key(
        1,
        "partial, async: maximum age of a response in training steps, from the version of its "
        "first token to the step that trains on it; 0 gives the weights of sync. async generates "
        "the batch of the next step during training from 1 on, and has responses of further steps "
        "in flight from 2 on",
        ge=0,
    )
    rollout_devices: int = key(
        0,
        "async: devices of the rollout, the last ones of each process. The others are those of "
        "mesh, for training",
        ge=0,
    )
    oversample: float = key(
        0.0,
        "partial, async: prompts in flight as a multiple of data.prompts_per_step; 0 = as many as "
        "max_staleness allows, which is 1 + max_staleness, or max(1, max_staleness) with async",
        ge=0,
    )
    keep_kv: bool = key(
        False,
        "partial, async: keep the KV of unfinished responses, which earlier weights computed, "
        "instead of computing it again under the new ones. After a validation, a ReMax baseline or "
        "a checkpoint it is computed again in any case",
    )
    order: str = key(
        "prompt",
        "partial, async: order in which groups are trained on. prompt = the order of the data, "
        "which is reproducible. arrival = groups that are generated and rewarded first, as far as "
        "no other becomes older than max_staleness",
        choices=GROUP_ORDERS,
    )

    rollout_workers: int = key(
        0,
        "async, instead of rollout_devices: processes that only generate, on any host of a Ray "
        "cluster, each with an engine over its own devices. Training processes have equal numbers "
        "of them. The run begins when they are ready",
        ge=0,
    )
    max_rollout_workers: int = key(
        0,
        "async: rollout workers that the run uses when the cluster has room for them, also if that "
        "is later; 0 = rollout_workers",
        ge=0,
    )
    hosts_per_worker: int = key(
        1,
        "async: hosts of each rollout worker. One engine runs over the devices of all of them, for "
        "a replica (rollout.tensor x rollout.expert) that does not fit on one host",
        ge=1,
    )
    worker_accelerator: str = key(
        "cpu",
        "async: devices that a rollout worker reserves on each of its hosts: cpu, gpu:N or tpu:N",
    )
    worker_timeout_s: float = key(
        600.0,
        "async: seconds after which a rollout worker that does not answer is started again, and "
        "after which a run without any worker ends with an error",
        gt=0,
    )
    weight_transfer: str = key(
        "full",
        "async: what rollout workers get of new weights. delta = the elements whose bits changed, "
        "which is exact; it needs host memory for one copy of the weights in the trainer and "
        "in each worker",
        choices=WEIGHT_TRANSFERS,
    )

    @property
    def n_workers(self) -> tuple[int, int]:
        """(rollout workers to begin with, the most that the run uses)."""
        return self.rollout_workers, self.max_rollout_workers or self.rollout_workers

    @property
    def lag(self) -> int:
        """Batches that are generated before the step before theirs has ended."""
        return min(1, self.max_staleness) if self.mode == "async" else 0

    @property
    def max_oversample(self) -> int:
        """Steps whose prompts may be in flight at the same time."""
        return 1 + self.max_staleness - self.lag

    def max_started(self, prompts_per_step: int) -> int:
        """Groups that may be in flight."""
        return math.ceil((self.oversample or self.max_oversample) * prompts_per_step)
