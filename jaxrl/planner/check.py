"""The plan of the run that is about to start, on the devices it has."""

import dataclasses
from collections.abc import Mapping

import jax

from jaxrl.config.keys import RunConfig
from jaxrl.models.config import DecoderConfig
from jaxrl.planner.plan import Plan, add_up
from jaxrl.planner.programs import Lengths, OfflineWorkload, TooLarge, compile_programs, run_parts
from jaxrl.planner.report import as_text, size
from jaxrl.planner.topology import CHIPS, Topology
from sharding import target_platform


def device_memory() -> int | None:
    """Bytes that a program may take of the smallest local device; None where devices do not say (CPU)."""
    stats = [device.memory_stats() for device in jax.local_devices()]
    limits = [s["bytes_limit"] for s in stats if s and "bytes_limit" in s]
    return min(limits) if limits else None


def check_plan(
    cfg: RunConfig,
    decoder: DecoderConfig,
    memory_bytes: int | float,
    *,
    others: Mapping[str, DecoderConfig] | None = None,
    workload: OfflineWorkload | None = None,
) -> Plan:
    """The plan on the mesh that is set, before anything lies on its devices. `others` and `workload` are as in
    `run_parts`.

    The programs are compiled ahead of warm-up, which takes from JAX's compilation cache what is the same.
    Raises ValueError with the plan's numbers where the run does not fit.
    """
    mesh = jax.sharding.get_mesh()
    platform = target_platform()
    chip = dataclasses.replace(
        CHIPS["cpu"], name=jax.local_devices()[0].device_kind, memory_bytes=float(memory_bytes)
    )
    machine = Topology(
        f"{mesh.size} {platform} devices", platform, chip, mesh.devices.flatten().tolist()
    )
    lengths = Lengths(cfg.data.max_prompt_len, cfg.data.max_response_len)
    advice = "set plan_check=False to try all the same"
    try:
        parts = run_parts(cfg, decoder, memory_bytes, others, workload)
        programs = compile_programs(parts, lengths)
    except TooLarge as problem:
        raise ValueError(f"the plan of this run {problem}; {advice}") from problem
    plan = add_up(parts, programs, machine, dict(mesh.shape), lengths)
    if not plan.fits:
        raise ValueError(
            f"the plan of this run does not fit its devices: {plan.why_not}. Lower learner.token_budget, "
            f"rollout.max_num_seqs or the lengths, or shard over more devices; {advice}.\n{as_text(plan)}"
        )
    return plan


def plan_line(plan: Plan) -> str:
    """The plan in a line of the console."""
    fullest = max(phase.live_bytes for phase in plan.phases.values())
    line = f"plan: {size(fullest)} of {size(plan.budget_bytes)} a device"
    if not plan.page_bytes:
        return line
    return f"{line}, {plan.kv_pages} KV pages, {plan.max_concurrent_sequences} sequences at a time"
