"""Text tables of a plan."""

import re

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from jaxrl.config.keys import RunConfig
from jaxrl.planner.call_times import compiler_seconds, roofline, serial
from jaxrl.planner.chips import Chip
from jaxrl.planner.compilation import Program
from jaxrl.planner.option_trials import OptionTrial
from jaxrl.planner.pipeline import PipelinePlan
from jaxrl.planner.plan import Plan
from jaxrl.planner.program_numbers import program_numbers
from jaxrl.planner.search import Candidate

WIDTH = 190
SHORT = {
    "all-gather": "AG",
    "all-reduce": "AR",
    "reduce-scatter": "RS",
    "all-to-all": "A2A",
    "ragged-all-to-all": "RA2A",
    "collective-permute": "CP",
    "collective-broadcast": "CB",
}


def show(plan: Plan, console: Console | None = None) -> None:
    """Prints the tables."""
    console = console or Console()
    console.width = max(console.width, WIDTH)
    console.print(tables(plan))


def as_text(plan: Plan, *, with_compile_s: bool = True) -> str:
    """The tables as plain text of fixed width."""
    console = Console(width=WIDTH, force_terminal=False, color_system=None)
    with console.capture() as captured:
        console.print(tables(plan, with_compile_s=with_compile_s))
    return re.sub(r"[ ]+\n", "\n", captured.get())


def tables(plan: Plan, *, with_compile_s: bool = True) -> Group:
    mesh = " x ".join(f"{axis} {n}" for axis, n in plan.mesh.items() if n > 1) or "1"
    lengths = plan.lengths
    head = (
        f"{plan.topology}: {plan.chip.name}, {format_bytes(plan.chip.memory_bytes)} per device, "
        f"mesh {mesh}; "
        f"sequences of {lengths.prompt} + {lengths.response} tokens"
    )
    if plan.n_workers:
        n_each = plan.n_rollout_devices // plan.n_workers
        head += f"; rollout on {plan.n_workers} workers with {n_each} more devices each"
    elif plan.n_rollout_devices:
        head += f"; rollout on {plan.n_rollout_devices} more devices, with two copies of weights"
    head += f"; {plan.note}" if plan.note else ""
    verdict = "fits" if plan.fits else f"does not fit: {plan.misfit}"
    state = ", ".join(
        f"{name} {format_bytes(n)}"
        for name, n in plan.resident.items()
        if name not in plan.host_resident
    )
    on_host = ""
    if plan.host_resident:
        shown = ", ".join(f"{name} {format_bytes(n)}" for name, n in plan.host_resident.items())
        on_host = f"in host memory per device: {shown}\n"
    pages = (
        f"KV pages: {plan.kv_pages} of {format_bytes(plan.page_bytes)}; "
        f"{_window_pages_text(plan)}"
        f"{f'states: {format_bytes(plan.state_bytes)}; ' if plan.state_bytes else ''}"
        f"concurrent sequences: {plan.max_concurrent_sequences}\n"
    )
    stages = f"{pipeline_text(plan.pipeline)}\n" if plan.pipeline else ""
    last = (
        f"{verdict}\n"
        f"resident on every device{' of training' if plan.n_rollout_devices else ''}: {state}\n"
        f"{on_host}"
        f"{pages if plan.page_bytes else ''}"
        f"{stages}"
        f"step at peak rates: {format_seconds(plan.expected_step_s)}, "
        f"{plan.tokens_per_s:,.0f} tokens/s; "
        f"with kernels one after the other: {format_seconds(plan.serial_step_s)}"
    )
    if plan.compiler_step_s:
        last += f"; by the compiler's estimate: {format_seconds(plan.compiler_step_s)}"
    if plan.calibrated_step_s:
        last += f"; calibrated: {format_seconds(plan.calibrated_step_s)}"
    parts = [Text(head), _programs(plan, with_compile_s), _phases(plan), Text(last)]
    if unknown := {loop for p in plan.programs.values() for loop in p.cost.unknown_loops}:
        parts.append(
            Text(
                "loops with data-dependent trip counts, counted once: " + ", ".join(sorted(unknown))
            )
        )
    return Group(*parts)


def pipeline_text(pipeline: PipelinePlan) -> str:
    """One line about the pipeline of the policy's update."""
    return (
        f"pipeline ({pipeline.schedule}): {pipeline.stages} stages, {pipeline.rows} rows per rank, "
        f"idle {pipeline.bubble:.0%} of {pipeline.ticks} ticks; activations kept for backward: "
        f"{format_bytes(pipeline.activation_bytes)}"
    )


ROLES = {  # state of a run -> what it is, and how to make it smaller
    "params": ("policy weights", "mesh.fsdp, mesh.tensor"),
    "base": ("frozen base model", "model.dtype, mesh.fsdp, mesh.tensor"),
    "opt_state": ("optimizer state", "learner.offload=optimizer, mesh.fsdp, learner.zero=1"),
    "ref": ("reference model", "learner.offload=reference, mesh.fsdp"),
    "critic": ("critic weights", "learner.offload=critic, mesh.fsdp, a smaller critic.path"),
    "critic_base": ("frozen base model of the critic", "mesh.fsdp, a smaller critic.path"),
    "critic_opt_state": (
        "critic optimizer state",
        "learner.offload=optimizer, mesh.fsdp, learner.zero=1",
    ),
    "reward_model": ("reward model", "learner.offload=reward_model, a smaller reward_model.path"),
    "judge": ("judge", "learner.offload=judge, reward.judge.dtype=int8, a smaller judge.path"),
    "judge_kv": ("KV pages of the judge", "reward.judge.max_num_seqs, reward.judge.n_pages"),
    "tower": ("vision tower", "mesh.fsdp"),
    "rollout_tower": ("vision tower of rollouts", "rollout.engines=mesh"),
}


def _window_pages_text(plan: Plan) -> str:
    """The pages of layers with a window, the bytes of all pages, and the limit of the sequences."""
    if not plan.window_pages:
        return ""
    pages = ", ".join(
        f"{n} in layers with a window of {window} tokens"
        for window, (n, _) in plan.window_pages.items()
    )
    return f"{pages}; {format_bytes(plan.kv_bytes)} together; limited by {plan.limit}; "


KV_LOWER = "rollout.release_kv, rollout.memory_utilization, rollout.n_pages, rollout.kv_dtype=int8"
PHASE_LOWER = {
    "rollout": "rollout.max_num_seqs, rollout.max_num_batched_tokens",
    "scoring": "learner.token_budget",
    "update": "learner.token_budget, learner.remat=full, learner.offload=gradients",
}


def memory_text(plan: Plan) -> str:
    """The planned memory of each role and phase against the device's, and the keys that change it.

    A phase's peak has all roles in it, and the KV pages unless rollout.release_kv frees them.
    """
    device, kv_bytes = plan.chip.memory_bytes, plan.kv_bytes + plan.state_bytes
    rows = [(*role_row(name), n_bytes) for name, n_bytes in plan.resident.items()]
    name = "KV pages and states" if plan.state_bytes else "KV pages"
    rows += [(name, KV_LOWER, kv_bytes)] if kv_bytes else []
    rows += [
        (
            f"peak of {name}",
            PHASE_LOWER[name],
            phase.live_bytes + kv_bytes * (name in plan.kv_phases),
        )
        for name, phase in plan.phases.items()
    ]
    lines = [f"plan per device of {format_bytes(device)}, and the keys to lower or set:"]
    lines += [
        f"  {role:<32}{format_bytes(n_bytes):>12}{n_bytes / device:>7.0%}  {keys}"
        for role, keys, n_bytes in rows
    ]
    return "\n".join(lines)


def role_row(name: str) -> tuple[str, str]:
    """A state of a run: its description, and how to make it smaller."""
    if not name.startswith("ref_"):
        return ROLES[name]
    shown, remedy = ROLES["ref"]
    return f"{shown} {name.removeprefix('ref_')}", remedy


def rollout_memory_text() -> str:
    """The keys that change the memory of generation, for programs without a plan."""
    rows = (
        (ROLES["params"][0], "mesh.tensor, rollout.dtype=int8"),
        ("KV pages", KV_LOWER),
        ("peak of rollout", PHASE_LOWER["rollout"]),
    )
    lines = [f"  {role:<32}{keys}" for role, keys in rows]
    return "\n".join(["the keys to lower or set:", *lines])


def search_text(found: list[tuple[Candidate, Plan | None]], cfg: RunConfig) -> str:
    """The compiled candidates, best first, as command-line options for the config."""
    lines = [
        "candidates, best first: (estimated step time), time with kernels one after the other, "
        "time at peak rates, peak memory"
    ]
    for candidate, plan in found:
        if plan is None:
            result = "a program is too large for the device"
        else:
            peak = max(phase.live_bytes for phase in plan.phases.values())
            verdict = "fits" if plan.fits else "does not fit"
            times = (plan.serial_step_s, plan.expected_step_s)
            shown = ", ".join(format_seconds(seconds) for seconds in times)
            if plan.calibrated_step_s:
                shown = f"{format_seconds(plan.calibrated_step_s)} calibrated, {shown}"
            result = f"{shown}, {format_bytes(peak)}, {verdict}"
        estimated = format_seconds(candidate.step_s)
        lines.append(f"  {candidate.overrides(cfg)}\n    ({estimated}) {result}")
    best, plan = found[0]
    if plan is not None and plan.fits:
        lines.append(
            f"cheapest that fits: {best.overrides(cfg)}\n    its estimated step time is "
            f"{best.slowdown:.0%} more than that of the fastest settings on devices of any memory"
        )
    return "\n".join(lines)


def trials_text(trials: list[OptionTrial], best: Plan | None) -> str:
    """The compiler options that were tried for the best candidate, and what they changed."""
    if best is None or not best.fits:
        return "compiler options were not tried: no candidate fits"
    if not trials:
        return f"compiler options were not tried: jaxrl knows no further ones for {best.chip.name}"
    lines = ["compiler options of the best candidate, each with those that were kept before it:"]
    return "\n".join([*lines, *map(_trial_text, trials)])


def _trial_text(trial: OptionTrial) -> str:
    name = f"  learner.xla={trial.option}:"
    if trial.error:
        return f"{name} not compiled: {trial.error}"
    change = f"{trial.after_s / trial.before_s - 1:+.1%}"
    verdict = "kept" if trial.kept else "left out" if trial.fits else "left out, does not fit"
    before, after = map(format_seconds, (trial.before_s, trial.after_s))
    return f"{name} {before} -> {after} ({change}), {verdict}"


def _programs(plan: Plan, with_compile_s: bool) -> Table:
    title = "one call of each program, per device"
    table = Table(title=title, box=SIMPLE_HEAD, title_justify="left")
    table.add_column("program", no_wrap=True)
    with_l2 = any(p.cost.l2_bytes for p in plan.programs.values())
    with_host = any(p.host_bytes for p in plan.programs.values())
    names = ["arguments", "temporaries", "outputs", *["host"] * with_host, "flops", "HBM"]
    names += ["L2"] * with_l2
    names += ["collectives, covered", "time", "bound", "serial"]
    with_estimate, calibrated = bool(plan.compiler_step_s), bool(plan.calibrated_step_s)
    names += [*["compiler"] * with_estimate, *["calibrated"] * calibrated]
    names += ["compile"] * with_compile_s
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for name, p in plan.programs.items():
        seconds, bound = roofline(p, plan.chip)
        row = [
            name,
            format_bytes(p.argument_bytes),
            format_bytes(p.temp_bytes),
            format_bytes(p.output_bytes),
            *[format_bytes(p.host_bytes)] * with_host,
            f"{p.cost.total_flops:.2e}",
            format_bytes(p.cost.bytes_accessed),
            *[format_bytes(p.cost.l2_bytes)] * with_l2,
            _collectives(p, plan.chip),
            format_seconds(seconds),
            bound,
            format_seconds(serial(p, plan.chip).total_s),
            *[format_seconds(compiler_seconds(p, plan.chip))] * with_estimate,
            *[_calibrated_text(name, p, plan.chip)] * calibrated,
        ]
        table.add_row(*row, *([f"{p.compile_s:.1f} s"] if with_compile_s else []))
    return table


def _calibrated_text(name: str, program: Program, chip: Chip) -> str:
    """The calibrated time of a call."""
    return format_seconds(program_numbers(name, program, chip).get("calibrated_s", 0.0))


def _collectives(program: Program, chip: Chip) -> str:
    """A line per kind: executions, bytes, and the share of its time that kernels cover."""
    found = serial(program, chip)
    return "\n".join(
        f"{SHORT[kind]} {one['count']}: {format_bytes(one['bytes'])} {found.covered(kind):4.0%}"
        for kind, one in program.cost.collectives_by_kind().items()
    )


def _phases(plan: Plan) -> Table:
    title = f"one step; {format_bytes(plan.budget_bytes)} usable per device"
    title += ", including KV pages" if plan.page_bytes else ""
    table = Table(title=title, box=SIMPLE_HEAD, title_justify="left")
    table.add_column("phase")
    with_estimate, calibrated = bool(plan.compiler_step_s), bool(plan.calibrated_step_s)
    names = ["live without KV", "fits", "time", "bound", "serial"]
    names += [*["compiler"] * with_estimate, *["calibrated"] * calibrated, "tokens/s"]
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for name, phase in plan.phases.items():
        table.add_row(
            name,
            format_bytes(phase.live_bytes),
            "yes" if phase.fits else "no",
            format_seconds(phase.roofline_s),
            phase.bound,
            format_seconds(phase.serial_s),
            *[format_seconds(phase.compiler_s)] * with_estimate,
            *[format_seconds(phase.calibrated_s)] * calibrated,
            f"{phase.tokens_per_s:,.0f}",
        )
    return table


def format_bytes(n_bytes: int | float) -> str:
    """A human-readable number of bytes."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if n_bytes >= factor:
            return f"{n_bytes / factor:.2f} {unit}"
    return f"{n_bytes:.0f} B"


def format_seconds(value_s: int | float) -> str:
    """A human-readable duration."""
    if value_s >= 1:
        return f"{value_s:,.1f} s"
    return f"{value_s * 1e3:.2f} ms"
