"""Whether a run fits, phase by phase, and how long a step takes at the machine's peak rates."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxrl.config.keys import RunConfig
from jaxrl.models.config import DecoderConfig
from jaxrl.models.mesh_check import check_mesh
from jaxrl.planner.cost import Collective
from jaxrl.planner.programs import (
    Lengths,
    OfflineWorkload,
    Parts,
    Program,
    compile_programs,
    run_parts,
    uses_ref,
)
from jaxrl.planner.topology import Chip, Topology
from sharding import make_mesh

PHASES = {
    "rollout": ("reshard", "prefill", "mixed", "copy_pages", "decode"),
    "scoring": ("reward_model", "reshard_score", "score", "reference", "values"),
    "update": ("count", "accumulate", "apply", "critic_accumulate", "critic_apply"),
}


@dataclasses.dataclass(frozen=True)
class Phase:
    """What is on a device at once while the programs of a phase run, and their time."""

    live_bytes: int  # at its fullest, without KV pages
    fits: bool  # with the KV pages
    roofline_s: float
    bound: str  # what most of that time goes to: "flops" | "memory" | "collectives" | "host"
    tokens_per_s: float


@dataclasses.dataclass(frozen=True)
class Plan:
    """A run on a topology. Bytes are per device."""

    topology: str
    chip: Chip
    mesh: dict[str, int]
    fits: bool
    why_not: str
    programs: dict[str, Program]
    phases: dict[str, Phase]
    resident: dict[str, int]
    budget_bytes: int
    page_bytes: int
    kv_pages: int
    max_concurrent_sequences: int
    expected_step_s: float
    tokens_per_s: float
    lengths: Lengths

    def json(self) -> dict[str, Any]:
        """The object of --json."""
        return {
            "fits": self.fits,
            "programs": {
                name: {
                    "argument_bytes": p.argument_bytes,
                    "temp_bytes": p.temp_bytes,
                    "output_bytes": p.output_bytes,
                    "flops": p.cost.total_flops,
                    "bytes_accessed": p.cost.bytes_accessed,
                    "collectives": p.cost.by_kind(),
                    "compile_s": round(p.compile_s, 2),
                }
                for name, p in self.programs.items()
            },
            "phases": {name: dataclasses.asdict(phase) for name, phase in self.phases.items()},
            "kv_pages": self.kv_pages,
            "max_concurrent_sequences": self.max_concurrent_sequences,
            "expected_step_s": self.expected_step_s,
        }


def make_plan(
    cfg: RunConfig,
    decoder: DecoderConfig,
    machine: Topology,
    *,
    others: Mapping[str, DecoderConfig] | None = None,
    workload: OfflineWorkload | None = None,
    lengths: Lengths | None = None,
    on_start: Callable[[str], None] = lambda name: None,
) -> Plan:
    """Compiles the run's programs for `machine` and adds up what they need.

    `others` and `workload` are as in `run_parts`. `lengths` (default: the longest allowed) are those of an average
    sequence. Raises ValueError where the mesh is not of the machine's devices or does not divide the model.
    """
    lengths = lengths or Lengths(cfg.data.max_prompt_len, cfg.data.max_response_len)
    mesh = make_mesh(machine.devices, **dataclasses.asdict(cfg.mesh))
    check_mesh(decoder, mesh.shape)
    with jax.set_mesh(mesh):
        parts = run_parts(cfg, decoder, machine.chip.memory_bytes, others, workload)
        programs = compile_programs(parts, lengths, on_start)
    return add_up(parts, programs, machine, dict(mesh.shape), lengths)


def add_up(
    parts: Parts,
    programs: dict[str, Program],
    machine: Topology,
    mesh: dict[str, int],
    lengths: Lengths,
) -> Plan:
    """The plan of compiled programs."""
    cfg, engine, chip = parts.cfg, parts.engine, machine.chip
    budget = int(cfg.rollout.memory_utilization * chip.memory_bytes)
    page_bytes = parts.page_bytes
    pool = page_bytes * parts.n_pages
    live = {name: live_bytes(p, parts, pool) for name, p in programs.items()}
    # The pool lies on the device through all phases, so the fullest of them bounds it.
    left = budget - max(live.values())
    pages = least = sequences = 0
    if engine is not None:
        room = left // page_bytes
        wanted = cfg.rollout.n_pages or cfg.rollout.max_num_seqs * engine.shapes.max_pages_per_seq
        pages = max(min(wanted, room), 0)
        least = cfg.rollout.n_pages or engine.shapes.max_pages_per_seq
        sequences = min(cfg.rollout.max_num_seqs, pages // engine.shapes.max_pages_per_seq)
    fits = left >= least * page_bytes
    calls = calls_per_step(cfg, parts, max(sequences, 1), lengths)
    phases = {}
    for phase, names in PHASES.items():
        found = [name for name in names if name in programs]
        if not found:
            continue
        times = {name: calls[name] * seconds(programs[name], chip)[0] for name in found}
        slowest = max(found, key=times.__getitem__)
        fullest = max(live[name] for name in found)
        total = sum(times.values())
        if "reference" in cfg.learner.offload and any(uses_ref(cfg, name) for name in found):
            total += parts.resident["ref"] / chip.host_bytes_per_s  # it comes for the phase
        phases[phase] = Phase(
            live_bytes=fullest,
            fits=fullest + least * page_bytes <= budget,
            roofline_s=total,
            bound=seconds(programs[slowest], chip)[1],
            tokens_per_s=_tokens(parts, lengths, phase) / total,
        )
    step_s = sum(phase.roofline_s for phase in phases.values())
    tight = max(live, key=live.__getitem__)
    why_not = (
        ""
        if fits
        else (
            f"{tight} needs {live[tight] / 2**30:.2f} GiB, of {budget / 2**30:.2f} GiB that "
            f"memory_utilization={cfg.rollout.memory_utilization} leaves of {chip.memory_bytes / 2**30:.2f}"
            + (
                f"; the {least} KV pages of "
                f"{'rollout.n_pages' if cfg.rollout.n_pages else 'one longest sequence'} take "
                f"{least * page_bytes / 2**30:.2f} GiB more"
                if least
                else ""
            )
        )
    )
    return Plan(
        topology=machine.name,
        chip=chip,
        mesh=mesh,
        fits=fits,
        why_not=why_not,
        programs=programs,
        phases=phases,
        resident=parts.resident,
        budget_bytes=budget,
        page_bytes=page_bytes,
        kv_pages=pages,
        max_concurrent_sequences=sequences * parts.n_replicas,
        expected_step_s=step_s,
        tokens_per_s=_tokens(parts, lengths, "step") / step_s,
        lengths=lengths,
    )


def live_bytes(program: Program, parts: Parts, pool_bytes: int) -> int:
    """What a device holds while a program runs, the KV pool apart: its arguments, temporaries and new
    outputs, and what of the run's state it is not given."""
    sizes = parts.resident | parts.shares
    held = sum(sizes[name] for name in program.holds if name != "kv")
    others = sum(parts.resident.values()) - held
    own = program.own_bytes - (pool_bytes if "kv" in program.holds else 0)
    return others + own


def seconds(program: Program, chip: Chip) -> tuple[float, str]:
    """(time of one call at the peak rates, what bounds it): the longest of computing, reading memory,
    moving data between devices and to the host, as if each ran beside the others."""
    cost = program.cost
    times = {
        "flops": sum(flops / chip.rate(dtype) for dtype, flops in cost.flops.items()),
        "memory": cost.bytes_accessed / chip.memory_bytes_per_s,
        "collectives": sum(link_seconds(one, chip) for one in cost.collectives),
        "host": cost.host_bytes / chip.host_bytes_per_s,
    }
    bound = max(times, key=times.__getitem__)
    return float(times[bound]), bound


def link_seconds(one: Collective, chip: Chip) -> float:
    """All executions of a collective on a ring: each device passes (n - 1) / n of the data on, twice
    for an all-reduce."""
    crosses = chip.node and one.spread >= chip.node
    rate = chip.network_bytes_per_s if crosses else chip.link_bytes_per_s
    if one.kind == "collective-permute":
        return one.times * one.bytes / rate
    rounds = 2 if one.kind == "all-reduce" else 1
    return one.times * rounds * one.bytes * (one.n_devices - 1) / one.n_devices / rate


def calls_per_step(
    cfg: RunConfig, parts: Parts, sequences: int, lengths: Lengths
) -> dict[str, int]:
    """How often each program runs in a training step; of decode, its steps."""
    total = parts.n_sequences
    rows, row_len = cfg.learner.shapes[-1]
    tokens = total * (lengths.prompt + lengths.response)
    micro = math.ceil(tokens / (parts.n_ranks * rows * row_len))
    of_values = {}
    for name, values in parts.values.items():
        own = values.cfg
        rows, row_len = own.learner.shapes[-1]
        its = math.ceil(tokens / (values.n_ranks * rows * row_len))
        learns = {
            "critic_accumulate": its * own.learner.epochs,
            "critic_apply": own.updates_per_step,
        }
        of_values[name] = learns.get(name, its)
    of_engine = {}
    if (engine := parts.engine) is not None:
        prompts = cfg.data.prompts_per_step / parts.n_replicas
        steps = math.ceil(total / (sequences * parts.n_replicas)) * lengths.response
        rows, n = engine.shapes.prefill_buckets[-1], cfg.rollout.n
        beside = 0
        if engine.shapes.mixed:
            of_prompt = math.ceil((lengths.prompt - 1) / engine.shapes.prefill_row_len)
            beside = min(mixed_dispatches(prompts, n, sequences, of_prompt, rows), steps)
        of_engine = {
            "reshard": 1,
            "prefill": max(
                math.ceil(prompts * lengths.prompt / (rows * engine.shapes.prefill_row_len))
                - beside,
                0,
            ),
            "mixed": beside,
            "copy_pages": 0,
            "decode": steps - beside,
        }
    of_learner = {
        "reshard_score": 1,
        "score": math.ceil(micro / parts.joined["score"]),
        "reference": math.ceil(micro / parts.joined["reference"]),
        "count": micro * cfg.learner.epochs,
        "accumulate": micro * cfg.learner.epochs,
        "apply": cfg.updates_per_step,
    }
    return of_engine | of_learner | of_values


def mixed_dispatches(
    prompts: int | float, n: int, sequences: int, prompt_rows: int, dispatch_rows: int
) -> int:
    """Dispatches that compute keys of a replica's `prompts`, of `n` samples each, beside a step.

    The first `sequences` start where nobody decodes. Then slots come free a 32nd at a time, and as many prompts come
    together as their samples fill these, one at least. Of their rows those run beside steps that fill a dispatch.
    """
    together = max(sequences // 32 // n, 1)
    late = max(prompts - sequences / n, 0)
    return int(late / together) * (together * prompt_rows // dispatch_rows)


def _tokens(parts: Parts, lengths: Lengths, phase: str) -> float:
    """Tokens that a phase is measured by: sampled ones in rollout, else all of the sequences."""
    own = 0 if phase == "rollout" else lengths.prompt
    return float(parts.n_sequences * (own + lengths.response))
