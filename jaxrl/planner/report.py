"""A plan as tables for people."""

import re

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from jaxrl.planner.plan import Plan, seconds
from jaxrl.planner.search import Candidate

WIDTH = 150
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
    console = console or Console()
    console.width = max(console.width, WIDTH)
    console.print(tables(plan))


def as_text(plan: Plan, *, with_compile_s: bool = True) -> str:
    """The tables as plain text of a fixed width."""
    console = Console(width=WIDTH, force_terminal=False, color_system=None)
    with console.capture() as captured:
        console.print(tables(plan, with_compile_s=with_compile_s))
    return re.sub(r"[ ]+\n", "\n", captured.get())


def tables(plan: Plan, *, with_compile_s: bool = True) -> Group:
    mesh = " x ".join(f"{axis} {n}" for axis, n in plan.mesh.items() if n > 1) or "1"
    lengths = plan.lengths
    head = (
        f"{plan.topology}: {plan.chip.name}, {size(plan.chip.memory_bytes)} a device, mesh {mesh}; "
        f"sequences of {lengths.prompt} + {lengths.response} tokens"
    )
    verdict = "fits" if plan.fits else f"does not fit: {plan.why_not}"
    state = ", ".join(f"{name} {size(n)}" for name, n in plan.resident.items())
    pages = (
        f"KV pages: {plan.kv_pages} of {size(plan.page_bytes)}; "
        f"concurrent sequences: {plan.max_concurrent_sequences}\n"
    )
    last = (
        f"{verdict}\n"
        f"on every device throughout: {state}\n"
        f"{pages if plan.page_bytes else ''}"
        f"a step at peak rates: {time(plan.expected_step_s)}, {plan.tokens_per_s:,.0f} tokens/s"
    )
    parts = [Text(head), _programs(plan, with_compile_s), _phases(plan), Text(last)]
    if unknown := {loop for p in plan.programs.values() for loop in p.cost.unknown_loops}:
        parts.append(
            Text("loops counted once, their length is data: " + ", ".join(sorted(unknown)))
        )
    return Group(*parts)


def search_text(found: list[tuple[Candidate, Plan | None]]) -> str:
    """The candidates that were compiled, the best first."""
    lines = ["candidates, the best first: step time at peak rates (by formula), fullest phase"]
    for candidate, plan in found:
        if plan is None:
            result = "a program is too large to compile"
        else:
            fullest = max(phase.live_bytes for phase in plan.phases.values())
            verdict = "fits" if plan.fits else "does not fit"
            result = f"{time(plan.expected_step_s)}, {size(fullest)}, {verdict}"
        lines.append(f"  {candidate.overrides}\n    ({time(candidate.step_s)}) {result}")
    return "\n".join(lines)


def _programs(plan: Plan, with_compile_s: bool) -> Table:
    table = Table(
        title="one call of each program, per device", box=SIMPLE_HEAD, title_justify="left"
    )
    table.add_column("program", no_wrap=True)
    names = ["arguments", "temporaries", "outputs", "flops", "HBM", "collectives", "time", "bound"]
    for name in names + ["compile"] * with_compile_s:
        table.add_column(name, justify="right", no_wrap=True)
    for name, p in plan.programs.items():
        collectives = "\n".join(
            f"{SHORT[kind]} {one['count']}: {size(one['bytes'])}"
            for kind, one in p.cost.by_kind().items()
        )
        took, bound = seconds(p, plan.chip)
        row = [
            name,
            size(p.argument_bytes),
            size(p.temp_bytes),
            size(p.output_bytes),
            f"{p.cost.total_flops:.2e}",
            size(p.cost.bytes_accessed),
            collectives,
            time(took),
            bound,
        ]
        table.add_row(*row, *([f"{p.compile_s:.1f} s"] if with_compile_s else []))
    return table


def _phases(plan: Plan) -> Table:
    title = f"a step; {size(plan.budget_bytes)} of a device may be used"
    title += ", KV pages included" if plan.page_bytes else ""
    table = Table(title=title, box=SIMPLE_HEAD, title_justify="left")
    table.add_column("phase")
    for name in ("live without KV", "fits", "time", "bound", "tokens/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, phase in plan.phases.items():
        table.add_row(
            name,
            size(phase.live_bytes),
            "yes" if phase.fits else "no",
            time(phase.roofline_s),
            phase.bound,
            f"{phase.tokens_per_s:,.0f}",
        )
    return table


def size(n_bytes: int | float) -> str:
    """Bytes for people."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if n_bytes >= factor:
            return f"{n_bytes / factor:.2f} {unit}"
    return f"{n_bytes:.0f} B"


def time(value_s: int | float) -> str:
    """Seconds for people."""
    if value_s >= 1:
        return f"{value_s:,.1f} s"
    return f"{value_s * 1e3:.2f} ms"
