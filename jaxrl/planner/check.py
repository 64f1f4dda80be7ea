"""Checks before a run that it fits the attached devices."""

import dataclasses
from collections.abc import Mapping

import jax

from jaxrl.config.keys import RunConfig
from jaxrl.layout import split_devices
from jaxrl.models.config import DecoderConfig
from jaxrl.planner.chips import CHIPS
from jaxrl.planner.compilation import ProgramTooLarge, compile_programs
from jaxrl.planner.plan import Plan, assemble_plan
from jaxrl.planner.programs import Lengths, OfflineWorkload, run_programs
from jaxrl.planner.remedies import remedies_text
from jaxrl.planner.report import as_text, format_bytes
from jaxrl.planner.sizes import Job
from jaxrl.planner.topology import Topology
from sharding import target_platform


def device_memory() -> int | None:
    """Usable bytes of the smallest local device; None if devices do not report it (CPU)."""
    stats = [device.memory_stats() for device in jax.local_devices()]
    limits = [s["bytes_limit"] for s in stats if s and "bytes_limit" in s]
    return min(limits) if limits else None


def check_plan(
    cfg: RunConfig,
    decoder: DecoderConfig,
    memory_bytes: int | float,
    *,
    role_decoders: Mapping[str, DecoderConfig] | None = None,
    workload: OfflineWorkload | None = None,
) -> Plan:
    """`attached_plan`, called before anything is on the devices.

    Compiles the programs ahead of warm-up, which finds them in JAX's compilation cache.
    Raises ValueError with the numbers of the plan if the run does not fit.
    """
    advice = "set plan_check=False to try anyway"
    machine = attached_machine(cfg, memory_bytes)
    lengths = Lengths(cfg.data.max_prompt_len, cfg.data.max_response_len)
    job = Job(cfg, decoder, machine, lengths, role_decoders or {}, workload)
    try:
        plan = attached_plan(
            cfg, decoder, memory_bytes, role_decoders=role_decoders, workload=workload
        )
    except ProgramTooLarge as error:
        raise ValueError(f"the plan of this run {error}; {advice}\n{remedies_text(job)}") from error
    if not plan.fits:
        raise ValueError(
            f"the plan of this run does not fit its devices: {plan.misfit}; "
            f"{advice}\n{remedies_text(job)}\n{as_text(plan)}"
        )
    return plan


def attached_plan(
    cfg: RunConfig,
    decoder: DecoderConfig,
    memory_bytes: int | float,
    *,
    role_decoders: Mapping[str, DecoderConfig] | None = None,
    workload: OfflineWorkload | None = None,
) -> Plan:
    """The plan of a run on the current mesh, whose devices have `memory_bytes` each.

    `role_decoders` and `workload` are as in `run_programs`. Raises ProgramTooLarge if the compiler
    runs out of device memory.
    """
    mesh, rollout = jax.sharding.get_mesh(), split_devices(cfg, jax.devices())[1]
    machine = attached_machine(cfg, memory_bytes)
    lengths = Lengths(cfg.data.max_prompt_len, cfg.data.max_response_len)
    run = run_programs(cfg, decoder, memory_bytes, role_decoders, workload, rollout)
    programs = compile_programs(run, lengths, machine)
    return assemble_plan(run, programs, machine, dict(mesh.shape), lengths)


def attached_machine(cfg: RunConfig, memory_bytes: int | float) -> Topology:
    """The devices of the current mesh and those of the rollout, with `memory_bytes` each."""
    mesh, rollout = jax.sharding.get_mesh(), split_devices(cfg, jax.devices())[1]
    platform = target_platform()
    chip = dataclasses.replace(
        CHIPS["cpu"], name=jax.local_devices()[0].device_kind, memory_bytes=float(memory_bytes)
    )
    return Topology(
        f"{mesh.size + len(rollout) * jax.process_count()} {platform} devices",
        platform,
        chip,
        [*mesh.devices.flatten().tolist(), *rollout],
    )


def plan_line(plan: Plan) -> str:
    """A one-line summary of the plan for the console."""
    peak = max(phase.live_bytes for phase in plan.phases.values())
    line = f"plan: {format_bytes(peak)} of {format_bytes(plan.budget_bytes)} per device"
    if not plan.page_bytes:
        return line
    return f"{line}, {plan.kv_pages} KV pages, {plan.max_concurrent_sequences} sequences at a time"
