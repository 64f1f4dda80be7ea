"""How fast a step was, per device and against what its chips can do."""

from collections.abc import Sequence

import jax
import numpy as np

from jaxrl.data.packing import Packed, sequence_lens
from jaxrl.models.flops import forward_flops
from jaxrl.planner.topology import chip_of
from jaxrl.trainer.run import Job


def speed_metrics(run: Job, n_tokens: int, learnt: Sequence[Packed]) -> dict[str, float]:
    """perf/tokens_per_s of the step that was timed last, the same per device, and perf/mfu_actor: the model
    FLOPs of the updates over what the devices could have done in time/update_actor_s. The last only on chips
    whose peak rate is known (planner/topology.py).

    `n_tokens` are those of the step's sequences, `learnt` the micro-batches of one epoch.
    """
    seconds, n_devices = run.seconds, jax.device_count()
    rate = n_tokens / seconds["time/step_s"]
    metrics = {"perf/tokens_per_s": rate, "perf/tokens_per_s_per_device": rate / n_devices}
    chip = chip_of(jax.devices()[0].device_kind)
    if chip is not None and learnt:
        params = run.state.params
        lens = np.concatenate([sequence_lens(packed.batch) for packed in learnt])
        done = 3 * run.cfg.learner.epochs * forward_flops(params.cfg, lens)
        peak = n_devices * chip.rate("bf16" if params.embed.dtype.itemsize == 2 else "f32")
        metrics["perf/mfu_actor"] = done / (peak * seconds["time/update_actor_s"])
    return metrics
