"""A rough time of a step on CPUs, by formula: whether a run is worth starting there."""

import dataclasses
import os

from jaxrl.planner.estimate import estimate_memory, step_seconds
from jaxrl.planner.programs import Lengths
from jaxrl.planner.remedies import settings_of
from jaxrl.planner.report import format_seconds
from jaxrl.planner.sizes import Job

SHORT = 0.1  # short responses, as a part of the maximum
SLOW_S = 60.0  # then the line says what to lower


def cpu_time_line(job: Job) -> str:
    """The time of a step with short and with the longest responses, and what to lower.

    The lengths of the job are the average prompt and the longest response.
    """
    short = Lengths(job.lengths.prompt, max(round(SHORT * job.lengths.response), 1))
    n_cores = len(os.sched_getaffinity(0))
    least, most = (
        _seconds(dataclasses.replace(job, lengths=lengths), n_cores)
        for lengths in (short, job.lengths)
    )
    line = (
        f"time of a step on {n_cores} CPU cores: {format_seconds(least)} to "
        f"{format_seconds(most)}, for responses of {short.response} to {job.lengths.response} "
        "tokens (a rough estimate from sizes, not a measurement)"
    )
    if least < SLOW_S:
        return line
    return (
        f"{line}; for a try on CPU lower data.prompts_per_step, rollout.n and "
        "data.max_response_len, or take a smaller model, as configs/quickstart.py does"
    )


def _seconds(job: Job, n_cores: int) -> float:
    """A simulated device stands for a core, but all of them share the cores of the machine."""
    settings = settings_of(job)
    seconds = step_seconds(job, settings, estimate_memory(job, settings))
    return seconds * len(job.machine.devices) / n_cores
