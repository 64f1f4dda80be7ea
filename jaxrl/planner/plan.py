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
from jaxrl.models.vision.config import TowerConfig
from jaxrl.planner.calibration import factors_of, round_seconds
from jaxrl.planner.call_times import compiler_seconds, roofline, serial_seconds
from jaxrl.planner.chips import Chip
from jaxrl.planner.compilation import Program, compile_programs, machine_note
from jaxrl.planner.judge import PREFIX as JUDGE
from jaxrl.planner.judge import judge_calls
from jaxrl.planner.memory import Memory, divide_memory, misfit
from jaxrl.planner.pipeline import PipelinePlan, pipeline_plan
from jaxrl.planner.program_numbers import present, program_numbers
from jaxrl.planner.programs import (
    Lengths,
    OfflineWorkload,
    RunPrograms,
    idle_state,
    run_programs,
)
from jaxrl.planner.rollout_devices import sides
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
    calibrated_s: float = 0.0  # with the factors of calibration.py; 0 if the chip has none


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
    page_bytes: int  # of all layers
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
    # Pages of layers with a window, and bytes of each, by window; of those that keep fewer pages.
    window_pages: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)
    limit: str = ""  # of the concurrent sequences: "max_num_seqs" or "memory"
    state_bytes: int = 0  # of the slots of state
    n_rollout_devices: int = 0  # not in `mesh`; 0: the same
    n_workers: int = 0  # that these devices belong to
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # `planned_config`
    pipeline: PipelinePlan | None = None  # None without stages
    compiler_step_s: float = 0.0  # `serial_step_s` by the compiler's estimate; 0 if it has none
    calibrated_step_s: float = 0.0  # 0 if the chip has no factors
    n_processes: int = 1  # of the run

    @property
    def kv_bytes(self) -> int:
        """Bytes of all KV pages."""
        fewer = ((self.kv_pages - n) * size for n, size in self.window_pages.values())
        return self.kv_pages * self.page_bytes - sum(fewer)

    def json(self) -> dict[str, Any]:
        """The object printed with --json."""
        names = (
            "host_resident",
            "window_pages",
            "state_bytes",
            "n_rollout_devices",
            "n_workers",
            "compiler_step_s",
            "calibrated_step_s",
        )
        optional: dict[str, Any] = {name: getattr(self, name) for name in names}
        if self.calibrated_step_s:
            optional["n_processes"] = self.n_processes
        if self.pipeline:
            optional["pipeline"] = dataclasses.asdict(self.pipeline)
        return {
            "topology": self.topology,
            "config": dict(self.config),
            "mesh": {axis: n for axis, n in self.mesh.items() if n > 1},
            "lengths": dataclasses.asdict(self.lengths),
            "fits": self.fits,
            "programs": {
                name: program_numbers(name, p, self.chip) for name, p in self.programs.items()
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
    return found | present({name: found.pop(name) for name in ("compiler_s", "calibrated_s")})


def make_plan(
    cfg: RunConfig,
    decoder: DecoderConfig,
    machine: Topology,
    *,
    role_decoders: Mapping[str, DecoderConfig] | None = None,
    workload: OfflineWorkload | None = None,
    tower: TowerConfig | None = None,
    lengths: Lengths | None = None,
    like: Plan | None = None,
    on_start: Callable[[str], None] = lambda name: None,
) -> Plan:
    """Compiles the run's programs for `machine` and plans its memory and time.

    `role_decoders`, `workload` and `tower` are as in `run_programs`. `lengths` are those of an
    average sequence (default: the maxima). `like` is a plan of the same run with another
    `learner.xla`: its programs that do not read that are not compiled again. Raises ValueError if
    the mesh does not match the number of devices or does not divide the model.
    """
    lengths = lengths or Lengths(cfg.data.max_prompt_len, cfg.data.max_response_len)
    devices, rollout = sides(cfg, machine)
    mesh = make_mesh(devices, **dataclasses.asdict(cfg.mesh))
    check_mesh(decoder, mesh.shape, training_rules(cfg))
    with jax.set_mesh(mesh):
        memory_bytes = machine.chip.memory_bytes
        run = run_programs(cfg, decoder, memory_bytes, role_decoders, workload, rollout, tower)
        known = {} if like is None else like.programs
        programs = compile_programs(run, lengths, machine, on_start, known)
    plan = assemble_plan(run, programs, machine, dict(mesh.shape), lengths)
    return dataclasses.replace(plan, config=planned_config(cfg))


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
        phase: _plan_phase(phase, present, run, programs, memory, calls, machine, lengths)
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
        misfit="" if memory.fits else misfit(run.cfg, memory, machine.chip),
        programs=programs,
        phases=phases,
        resident=run.resident,
        host_resident=run.host_resident,
        budget_bytes=memory.budget_bytes,
        page_bytes=sum(run.pool_bytes.page_bytes.values()),
        window_pages={
            window: (n, run.pool_bytes.page_bytes[window])
            for window, n in run.pool_bytes.window_pages(memory.kv_pages).items()
        },
        limit="max_num_seqs" if memory.sequences == run.cfg.rollout.max_num_seqs else "memory",
        state_bytes=run.state_bytes,
        kv_pages=memory.kv_pages,
        kv_phases=tuple(name for name in phases if name in with_pages),
        max_concurrent_sequences=memory.sequences * run.n_replicas,
        expected_step_s=step_s,
        serial_step_s=step_seconds(run, {name: phase.serial_s for name, phase in phases.items()}),
        compiler_step_s=step_seconds(run, {name: p.compiler_s for name, p in phases.items()}),
        calibrated_step_s=step_seconds(run, {name: p.calibrated_s for name, p in phases.items()}),
        tokens_per_s=_n_tokens(run, lengths, "step") / step_s,
        lengths=lengths,
        note=machine_note(run.cfg, machine),
        n_replicas=run.n_replicas,
        rollout_weight_bytes=_rollout_weight_bytes(run, programs),
        n_rollout_devices=run.n_rollout_devices,
        n_workers=run.n_workers,
        n_processes=machine.n_processes,
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
    return (
        programs["decode"].argument_bytes - run.pool_bytes.of_pages(run.n_pages) - run.state_bytes
    )


def _plan_phase(
    phase: str,
    names: list[str],
    run: RunPrograms,
    programs: dict[str, Program],
    memory: Memory,
    calls: dict[str, int],
    machine: Topology,
    lengths: Lengths,
) -> Phase:
    chip = machine.chip
    ideal = {name: calls[name] * roofline(programs[name], chip)[0] for name in names}
    slowest = max(names, key=ideal.__getitem__)
    peak = max(memory.live_bytes[name] for name in names)
    loaded = _moved_bytes(run, names) / chip.host_bytes_per_s
    by_compiler = sum(calls[name] * compiler_seconds(programs[name], chip) for name in names)
    calibrated = _calibrated(names, run, programs, memory, calls, machine)
    total = loaded + sum(ideal.values())
    return Phase(
        live_bytes=peak,
        fits=all(memory.needed(name) <= memory.budget_bytes for name in names),
        roofline_s=total,
        serial_s=loaded + sum(calls[name] * serial_seconds(programs[name], chip) for name in names),
        bound=roofline(programs[slowest], chip)[1],
        tokens_per_s=_n_tokens(run, lengths, phase) / total,
        compiler_s=by_compiler and loaded + by_compiler,
        calibrated_s=calibrated and loaded + calibrated,
    )


def _calibrated(
    names: list[str],
    run: RunPrograms,
    programs: dict[str, Program],
    memory: Memory,
    calls: dict[str, int],
    machine: Topology,
) -> float:
    """Seconds of a phase's programs, and of the host where a dispatch of the engine waits for it.

    0 if the chip has no factors.
    """
    if (factors := factors_of(machine.chip)) is None:
        return 0.0
    numbers = {name: program_numbers(name, programs[name], machine.chip) for name in names}
    total = sum(calls[name] * numbers[name]["calibrated_s"] for name in names)
    if "decode" in names:
        n_sequences = memory.sequences * run.n_replicas / machine.n_processes
        n_steps = run.cfg.rollout.steps_per_dispatch
        device_s = n_steps * numbers["decode"]["calibrated_s"]
        waited_s = max(round_seconds(n_sequences, factors) - device_s, 0.0)
        total += calls["decode"] / n_steps * waited_s
    return total


def _moved_bytes(run: RunPrograms, names: list[str]) -> int:
    """Offloaded weights that the programs of a phase read from host memory, or write to it."""
    moved = 0
    for role in run.cfg.learner.offload:
        n_bytes = sum(run.resident[name] for name in idle_state(role, run.resident))
        n_copies = any(role in run.table[name].offloads for name in names)
        n_copies += role == "critic" and "critic_apply" in names  # changed weights, to the host
        if role == "policy":  # to the host and back around a rollout
            n_copies = 2 * ("decode" in names)
        moved += n_bytes * n_copies
    return moved


def calls_per_step(
    cfg: RunConfig, run: RunPrograms, sequences: int, lengths: Lengths
) -> dict[str, int]:
    """Calls of each program in a training step; for decode, single decode steps.

    `sequences` is the number that an engine replica decodes at the same time.
    """
    trained = run.n_sequences + cfg.data.demonstrations_per_step
    tokens = trained * (lengths.prompt + lengths.response)
    table = run.table.items()
    training = {name: program.row.calls(name, tokens) for name, program in table if program.row}
    resharding = {"reshard_score": 1, "reshard_ref": 1}
    judging = _judge_calls(run)
    return _engine_calls(cfg, run, sequences, lengths) | judging | resharding | training


def _judge_calls(run: RunPrograms) -> dict[str, int]:
    """Calls of the programs of a judge on the devices; copies of pages are rare."""
    names = [name for name in run.table if name.startswith(JUDGE)]
    engine = run.judge or run.engine
    if not names or engine is None:
        return {}
    found = judge_calls(run.cfg, engine, run.n_sequences, run.n_replicas)
    return {name: found.get(name.removeprefix(JUDGE), 0) for name in names}


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
