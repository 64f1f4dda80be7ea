"""Checks before a run on the attached devices: that it fits, and the time of a step on CPUs."""

import dataclasses
import os
from collections.abc import Mapping

import jax

from jaxrl.config.keys import RunConfig
from jaxrl.layout import split_devices
from jaxrl.models.config import DecoderConfig
from jaxrl.models.vision.config import TowerConfig
from jaxrl.planner.chips import CHIPS
from jaxrl.planner.compilation import ProgramTooLarge, compile_programs
from jaxrl.planner.estimate import estimate_memory, step_seconds
from jaxrl.planner.plan import Plan, assemble_plan
from jaxrl.planner.programs import Lengths, OfflineWorkload, run_programs
from jaxrl.planner.remedies import remedies_text
from jaxrl.planner.report import as_text, format_bytes, format_seconds
from jaxrl.planner.sizes import Job, settings_of
from jaxrl.planner.topology import Topology
from jaxrl.runtime.device_memory import jax_share, whole_bytes
from sharding import target_platform

SHORT = 0.1  # short responses, as a part of the maximum
SLOW_S = 60.0  # then the line says what to lower


def device_memory() -> float | None:
    """Bytes of the smallest local device; None if devices do not report them (CPU)."""
    stats = [device.memory_stats() for device in jax.local_devices()]
    sizes = [whole_bytes(s) for s in stats if s and "bytes_limit" in s]
    return min(sizes) if sizes else None


def attached_job(
    cfg: RunConfig,
    decoder: DecoderConfig,
    memory_bytes: int | float,
    role_decoders: Mapping[str, DecoderConfig] | None = None,
    workload: OfflineWorkload | None = None,
    tower: TowerConfig | None = None,
) -> Job:
    """A run on the devices of the current mesh and of the rollout, with `memory_bytes` each.

    `role_decoders`, `workload` and `tower` are as in `run_programs`.
    """
    mesh, rollout = jax.sharding.get_mesh(), split_devices(cfg, jax.devices())[1]
    platform = target_platform()
    chip = dataclasses.replace(
        CHIPS["cpu"],
        name=jax.local_devices()[0].device_kind,
        memory_bytes=float(memory_bytes),
        jax_share=jax_share(),
    )
    machine = Topology(
        f"{mesh.size + len(rollout) * jax.process_count()} {platform} devices",
        platform,
        chip,
        [*mesh.devices.flatten().tolist(), *rollout],
    )
    lengths = Lengths(cfg.data.max_prompt_len, cfg.data.max_response_len)
    return Job(cfg, decoder, machine, lengths, role_decoders or {}, workload, tower)


def check_plan(job: Job) -> Plan:
    """`attached_plan`, called before anything is on the devices.

    Compiles the programs ahead of warm-up, which finds them in JAX's compilation cache.
    Raises ValueError with the numbers of the plan if the run does not fit.
    """
    advice = "set plan_check=False to try anyway"
    try:
        plan = attached_plan(job)
    except ProgramTooLarge as error:
        raise ValueError(f"the plan of this run {error}; {advice}\n{remedies_text(job)}") from error
    if not plan.fits:
        raise ValueError(
            f"the plan of this run does not fit its devices: {plan.misfit}; "
            f"{advice}\n{remedies_text(job)}\n{as_text(plan)}"
        )
    return plan


def attached_plan(job: Job) -> Plan:
    """The plan of a run on the current mesh.

    Raises ProgramTooLarge if the compiler runs out of device memory.
    """
    cfg, machine = job.cfg, job.machine
    mesh, rollout = jax.sharding.get_mesh(), split_devices(cfg, jax.devices())[1]
    memory_bytes = machine.chip.memory_bytes
    roles, workload = job.role_decoders, job.workload
    run = run_programs(cfg, job.decoder, memory_bytes, roles, workload, rollout, job.tower)
    programs = compile_programs(run, job.lengths, machine)
    return assemble_plan(run, programs, machine, dict(mesh.shape), job.lengths)


def plan_line(plan: Plan) -> str:
    """A one-line summary of the plan for the console."""
    peak = max(phase.live_bytes for phase in plan.phases.values())
    line = f"plan: {format_bytes(peak)} of {format_bytes(plan.budget_bytes)} per device"
    if not plan.page_bytes:
        return line
    return f"{line}, {plan.kv_pages} KV pages, {plan.max_concurrent_sequences} sequences at a time"


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
