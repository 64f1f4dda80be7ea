"""Memory per phase of a training step, and its time at the machine's peak rates."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxrl.config.keys import RunConfig
from jaxrl.layout import training_rules
from jaxrl.models.config import DecoderConfig, for_platform
from jaxrl.models.mesh_check import check_mesh
from jaxrl.planner.call_times import (
    compiler_seconds,
    resource_seconds,
    roofline,
    serial,
    serial_seconds,
)
from jaxrl.planner.chips import Chip
from jaxrl.planner.compilation import Program, compile_programs, machine_note
from jaxrl.planner.pipeline import PipelinePlan, pipeline_plan
from jaxrl.planner.programs import (
    IDLE_STATE,
    Lengths,
    OfflineWorkload,
    RunPrograms,
    run_programs,
    state_before_offload,
)
from jaxrl.planner.rollout_devices import n_copies, sides
from jaxrl.planner.saved_plan import planned_config
from jaxrl.planner.topology import Topology
from sharding import make_mesh

PHASES = ("rollout", "scoring", "update")


@dataclasses.dataclass(frozen=True)
class Phase:
    """Peak memory of a device while a phase's programs run, and the time of the phase."""

    live_bytes: int  # peak, without KV pages
    fits: bool  # with the KV pages
    roofline_s: float
    serial_s: float  # kernels one after the other, and exposed collectives and host transfers
    bound: str  # of the slowest program: "flops" | "memory" | "collectives" | "host"
    tokens_per_s: float
    compiler_s: float = 0.0  # `serial_s` by the compiler's estimate; 0 if it has none


@dataclasses.dataclass(frozen=True)
class Plan:
    """A run on a topology. Bytes are per device."""

    topology: str
    chip: Chip
    mesh: dict[str, int]
    fits: bool
    misfit: str  # the reason if it does not fit, else ""
    programs: dict[str, Program]
    phases: dict[str, Phase]
    resident: dict[str, int]
    host_resident: dict[str, int]  # state in host memory
    budget_bytes: int
    page_bytes: int
    kv_pages: int
    kv_phases: tuple[str, ...]  # phases in which the KV pages are allocated
    max_concurrent_sequences: int
    expected_step_s: float
    serial_step_s: float
    tokens_per_s: float
    lengths: Lengths
    note: str  # `machine_note`
    n_replicas: int  # of the engine
    rollout_weight_bytes: int  # of the weights that it reads
    state_bytes: int = 0  # of the slots of state
    n_rollout_devices: int = 0  # not in `mesh`; 0: the same
    n_workers: int = 0  # that these devices belong to
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # `planned_config`
    pipeline: PipelinePlan | None = None  # None without stages
    compiler_step_s: float = 0.0  # `serial_step_s` by the compiler's estimate; 0 if it has none

    def json(self) -> dict[str, Any]:
        """The object printed with --json."""
        names = (
            "host_resident",
            "state_bytes",
            "n_rollout_devices",
            "n_workers",
            "compiler_step_s",
        )
        optional: dict[str, Any] = {name: getattr(self, name) for name in names}
        if self.pipeline:
            optional["pipeline"] = dataclasses.asdict(self.pipeline)
        return {
            "topology": self.topology,
            "config": dict(self.config),
            "mesh": {axis: n for axis, n in self.mesh.items() if n > 1},
            "lengths": dataclasses.asdict(self.lengths),
            "fits": self.fits,
            "programs": {
                name: {
                    "argument_bytes": p.argument_bytes,
                    "temp_bytes": p.temp_bytes,
                    "output_bytes": p.output_bytes,
                    "flops": p.cost.total_flops,
                    "bytes_accessed": p.cost.bytes_accessed,
                    "l2_bytes": p.cost.l2_bytes,
                    "kernels_s": serial(p, self.chip).kernels_s,
                    "collectives": _collectives(p, self.chip),
                    "seconds": resource_seconds(p, self.chip),
                    "compile_s": round(p.compile_s, 2),
                }
                | _estimate(compiler_seconds(p, self.chip))
                for name, p in self.programs.items()
            },
            "phases": {name: _phase(phase) for name, phase in self.phases.items()},
            "resident": self.resident,
            "budget_bytes": self.budget_bytes,
            "page_bytes": self.page_bytes,
            "kv_pages": self.kv_pages,
            "n_replicas": self.n_replicas,
            "rollout_weight_bytes": self.rollout_weight_bytes,
            "max_concurrent_sequences": self.max_concurrent_sequences,
            "expected_step_s": self.expected_step_s,
            "serial_step_s": self.serial_step_s,
        } | {name: value for name, value in optional.items() if value}


def _phase(phase: Phase) -> dict[str, Any]:
    found = dataclasses.asdict(phase)
    return found | _estimate(found.pop("compiler_s"))


def _estimate(seconds: float) -> dict[str, float]:
    """The entry of the compiler's estimate, if it has one."""
    return {"compiler_s": seconds} if seconds else {}


def _collectives(program: Program, chip: Chip) -> dict[str, dict[str, int | float]]:
    """{kind: {"count", "bytes", "seconds", "exposed_s"}} of one call."""
    found = serial(program, chip)
    return {
        kind: one
        | {
            "seconds": found.collectives_s.get(kind, 0.0),
            "exposed_s": found.exposed_s.get(kind, 0.0),
        }
        for kind, one in program.cost.collectives_by_kind().items()
    }


@dataclasses.dataclass(frozen=True)
class Memory:
    """How a device's memory is divided. Bytes are per device."""

    budget_bytes: int
    live_bytes: dict[str, int]  # by program, without KV pages and states
    kv_pages: int
    min_pages: int  # that the run needs
    sequences: int  # that an engine replica can decode at the same time
    page_bytes: int
    state_bytes: int  # of the slots of state
    with_pages: frozenset[str]  # programs during which pages and slots are allocated

    @property
    def peak_program(self) -> str:
        return max(self.live_bytes, key=self.needed)

    @property
    def fits(self) -> bool:
        return all(self.needed(name) <= self.budget_bytes for name in self.live_bytes)

    def needed(self, program: str) -> int:
        """Bytes while a program runs, with the fewest KV pages that the run needs then."""
        pool = self.state_bytes + self.min_pages * self.page_bytes
        return self.live_bytes[program] + pool * (program in self.with_pages)


def make_plan(
    cfg: RunConfig,
    decoder: DecoderConfig,
    machine: Topology,
    *,
    role_decoders: Mapping[str, DecoderConfig] | None = None,
    workload: OfflineWorkload | None = None,
    lengths: Lengths | None = None,
    on_start: Callable[[str], None] = lambda name: None,
) -> Plan:
    """Compiles the run's programs for `machine` and plans its memory and time.

    `role_decoders` and `workload` are as in `run_programs`. `lengths` are those of an average
    sequence (default: the maxima). Raises ValueError if the mesh does not match the number of
    devices or does not divide the model.
    """
    lengths = lengths or Lengths(cfg.data.max_prompt_len, cfg.data.max_response_len)
    devices, rollout = sides(cfg, machine)
    mesh = make_mesh(devices, **dataclasses.asdict(cfg.mesh))
    check_mesh(decoder, mesh.shape, training_rules(cfg))
    with jax.set_mesh(mesh):
        memory_bytes = machine.chip.memory_bytes
        run = run_programs(cfg, decoder, memory_bytes, role_decoders, workload, rollout)
        programs = compile_programs(run, lengths, machine, on_start)
    return assemble_plan(run, programs, machine, dict(mesh.shape), lengths)


def assemble_plan(
    run: RunPrograms,
    programs: dict[str, Program],
    machine: Topology,
    mesh: dict[str, int],
    lengths: Lengths,
) -> Plan:
    """The plan of a run from its compiled programs."""
    memory = divide_memory(run, programs, machine.chip)
    calls = calls_per_step(run.cfg, run, max(memory.sequences, 1), lengths)
    phases = {
        phase: _plan_phase(phase, present, run, programs, memory, calls, machine.chip, lengths)
        for phase in PHASES
        if (present := [name for name in programs if run.table[name].phase == phase])
    }
    with_pages = {run.table[name].phase for name in memory.with_pages}
    dtype = for_platform(run.cfg, run.decoder, machine.platform)[0]
    step_s = step_seconds(run, {name: phase.roofline_s for name, phase in phases.items()})
    return Plan(
        topology=machine.name,
        chip=machine.chip,
        mesh=mesh,
        fits=memory.fits,
        misfit="" if memory.fits else _misfit(run.cfg, memory, machine.chip),
        programs=programs,
        phases=phases,
        resident=run.resident,
        host_resident=run.host_resident,
        budget_bytes=memory.budget_bytes,
        page_bytes=run.page_bytes,
        state_bytes=run.state_bytes,
        kv_pages=memory.kv_pages,
        kv_phases=tuple(name for name in phases if name in with_pages),
        max_concurrent_sequences=memory.sequences * run.n_replicas,
        expected_step_s=step_s,
        serial_step_s=step_seconds(run, {name: phase.serial_s for name, phase in phases.items()}),
        compiler_step_s=step_seconds(run, {name: p.compiler_s for name, p in phases.items()}),
        tokens_per_s=_n_tokens(run, lengths, "step") / step_s,
        lengths=lengths,
        note=machine_note(run.cfg, machine),
        n_replicas=run.n_replicas,
        rollout_weight_bytes=_rollout_weight_bytes(run, programs),
        n_rollout_devices=run.n_rollout_devices,
        n_workers=run.n_workers,
        config=planned_config(run.cfg),
        pipeline=pipeline_plan(run.cfg, run.decoder, mesh, dtype.itemsize),
    )


def step_seconds(run: RunPrograms, phases: Mapping[str, float]) -> float:
    """Time of a step from its phases' times: the slower side if rollout and training overlap."""
    rollout = phases.get("rollout", 0.0)
    training = sum(phases.values()) - rollout
    return max(rollout, training) if run.cfg.schedule.lag else rollout + training


def _rollout_weight_bytes(run: RunPrograms, programs: dict[str, Program]) -> int:
    """Weights that the engine reads: the arguments of decode without the KV pool."""
    if "decode" not in programs:
        return 0
    return programs["decode"].argument_bytes - run.page_bytes * run.n_pages - run.state_bytes


def divide_memory(run: RunPrograms, programs: dict[str, Program], chip: Chip) -> Memory:
    """Gives the KV pool what the program with the highest peak leaves free.

    The pool stays on the device through all phases, so that program bounds it; with
    rollout.release_kv only programs of the rollout do.
    """
    cfg, engine = run.cfg.rollout, run.engine
    page_bytes, state_bytes = run.page_bytes, run.state_bytes
    budget = int(cfg.memory_utilization * chip.memory_bytes)
    pool_bytes = page_bytes * run.n_pages + state_bytes
    live = {name: live_bytes(p, run, pool_bytes) for name, p in programs.items()}
    if "policy" in run.cfg.learner.offload:
        state = state_before_offload(run.resident, run.host_resident)
        live["the copy of the rollout"] = state + run.role_weights["rollout_made"]
    pages = min_pages = sequences = 0
    # With release_kv only the rollout and the reward model, which runs between rollouts, see pages.
    with_pages = frozenset(programs)
    rollout = {name for name in programs if run.table[name].phase == "rollout"}
    if run.n_rollout_devices:
        with_pages = frozenset(rollout)
    elif cfg.release_kv:
        before_pages = {"reshard"} if "policy" in run.cfg.learner.offload else set()
        between = {name for name in programs if (row := run.table[name].row) and row.with_pages}
        with_pages = frozenset(rollout | between) - before_pages
    if engine is not None:
        wanted = cfg.n_pages or cfg.max_num_seqs * engine.shapes.max_pages_per_seq
        peak = max(n_bytes for name, n_bytes in live.items() if name in with_pages)
        pages = max(min(wanted, (budget - peak - state_bytes) // page_bytes), 0)
        min_pages = cfg.n_pages or engine.shapes.max_pages_per_seq
        sequences = min(cfg.max_num_seqs, pages // engine.shapes.max_pages_per_seq)
    return Memory(budget, live, pages, min_pages, sequences, page_bytes, state_bytes, with_pages)


def _plan_phase(
    phase: str,
    names: list[str],
    run: RunPrograms,
    programs: dict[str, Program],
    memory: Memory,
    calls: dict[str, int],
    chip: Chip,
    lengths: Lengths,
) -> Phase:
    ideal = {name: calls[name] * roofline(programs[name], chip)[0] for name in names}
    slowest = max(names, key=ideal.__getitem__)
    peak = max(memory.live_bytes[name] for name in names)
    loaded = _moved_bytes(run, names) / chip.host_bytes_per_s
    by_compiler = sum(calls[name] * compiler_seconds(programs[name], chip) for name in names)
    total = loaded + sum(ideal.values())
    return Phase(
        live_bytes=peak,
        fits=all(memory.needed(name) <= memory.budget_bytes for name in names),
        roofline_s=total,
        serial_s=loaded + sum(calls[name] * serial_seconds(programs[name], chip) for name in names),
        bound=roofline(programs[slowest], chip)[1],
        tokens_per_s=_n_tokens(run, lengths, phase) / total,
        compiler_s=by_compiler and loaded + by_compiler,
    )


def _moved_bytes(run: RunPrograms, names: list[str]) -> int:
    """Offloaded weights that the programs of a phase read from host memory, or write to it."""
    moved = 0
    for role in run.cfg.learner.offload:
        n_bytes = sum(run.resident.get(name, 0) for name in IDLE_STATE.get(role, ()))
        n_copies = any(role in run.table[name].offloads for name in names)
        n_copies += role == "critic" and "critic_apply" in names  # changed weights, to the host
        if role == "policy":  # to the host and back around a rollout
            n_copies = 2 * ("decode" in names)
        moved += n_bytes * n_copies
    return moved


def _misfit(cfg: RunConfig, memory: Memory, chip: Chip) -> str:
    """Why the run does not fit, with the numbers."""
    name = memory.peak_program
    reason = (
        f"{name} needs {memory.live_bytes[name] / 2**30:.2f} GiB of the "
        f"{memory.budget_bytes / 2**30:.2f} GiB that "
        f"memory_utilization={cfg.rollout.memory_utilization} allows "
        f"of {chip.memory_bytes / 2**30:.2f} GiB"
    )
    if memory.min_pages and name in memory.with_pages:
        source = "rollout.n_pages" if cfg.rollout.n_pages else "one sequence of maximum length"
        pages_gib = memory.min_pages * memory.page_bytes / 2**30
        reason += f"; the {memory.min_pages} KV pages of {source} take {pages_gib:.2f} GiB more"
    if memory.state_bytes and name in memory.with_pages:
        gib = memory.state_bytes / 2**30
        reason += f"; the states of max_num_seqs={cfg.rollout.max_num_seqs} take {gib:.2f} GiB more"
    return reason


def live_bytes(program: Program, run: RunPrograms, pool_bytes: int) -> int:
    """Memory in use on a device while a program runs, without KV pages and states.

    Its arguments, temporaries and new outputs, and the rest of the run's state. On separate devices
    of the rollout this is its weights, with all copies.
    """
    sizes = run.resident | run.role_weights
    has_pool = "kv" in program.counted_state
    if has_pool and run.n_rollout_devices:
        counted = "rollout_aliased" in program.counted_state
        other_state = (n_copies(run.cfg) - counted) * sizes["rollout_aliased"]
    else:
        counted = sum(sizes[name] for name in program.counted_state if name != "kv")
        other_state = sum(run.resident.values()) - counted
    return other_state + program.footprint_bytes - (pool_bytes if has_pool else 0)


def calls_per_step(
    cfg: RunConfig, run: RunPrograms, sequences: int, lengths: Lengths
) -> dict[str, int]:
    """Calls of each program in a training step; for decode, single decode steps.

    `sequences` is the number that an engine replica decodes at the same time.
    """
    tokens = run.n_sequences * (lengths.prompt + lengths.response)
    table = run.table.items()
    training = {name: program.row.calls(name, tokens) for name, program in table if program.row}
    resharding = {"reshard_score": 1, "reshard_ref": 1}
    return _engine_calls(cfg, run, sequences, lengths) | resharding | training


def _engine_calls(
    cfg: RunConfig, run: RunPrograms, sequences: int, lengths: Lengths
) -> dict[str, int]:
    if (engine := run.engine) is None:
        return {}
    prompts = cfg.data.prompts_per_step / run.n_replicas
    waves = math.ceil(run.n_sequences / (sequences * run.n_replicas))
    steps = waves * lengths.response
    rows, mixed = engine.shapes.prefill_buckets[-1], 0
    if engine.shapes.mixed:
        prompt_rows = math.ceil((lengths.prompt - 1) / engine.shapes.prefill_row_len)
        n = cfg.rollout.n
        mixed = min(mixed_dispatches(prompts, n, sequences, prompt_rows, rows), steps)
    prefills = math.ceil(prompts * lengths.prompt / (rows * engine.shapes.prefill_row_len))
    return {
        "reshard": 1,
        "send": 1,
        "prefill": max(prefills - mixed, 0),
        "mixed": mixed,
        "copy_pages": 0,
        "copy_states": 0,
        "decode": steps - mixed,
    }


def mixed_dispatches(
    prompts: int | float, n: int, sequences: int, prompt_rows: int, dispatch_rows: int
) -> int:
    """Dispatches that mix prefill with a decode step, for a replica's prompts of `n` samples each.

    The first `sequences` start before any decode. Then slots become free a 32nd at a time, and
    enough prompts start together to fill them, at least one. Of the rows of these prompts, as
    many are mixed with decode as fill whole dispatches.
    """
    together = max(sequences // 32 // n, 1)
    later_prompts = max(prompts - sequences / n, 0)
    return int(later_prompts / together) * (together * prompt_rows // dispatch_rows)


def _n_tokens(run: RunPrograms, lengths: Lengths, phase: str) -> float:
    """Tokens that a phase's throughput counts: sampled ones in rollout, else all."""
    prompt = 0 if phase == "rollout" else lengths.prompt
    return float(run.n_sequences * (prompt + lengths.response))
