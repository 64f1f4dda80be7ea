"""Comparison of two plans, number by number."""

from collections.abc import Iterator, Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from jaxrl.planner.report import format_bytes, format_seconds

EQUAL = 0.005  # relative difference that is not shown
SKIPPED = ("compile_s",)
WIDTH = 110


def comparison_text(a: Mapping[str, Any], b: Mapping[str, Any], names: tuple[str, str]) -> str:
    """The numbers in which two plans (objects of --json) differ, and their ratio."""
    before, after = dict(_numbers(a)), dict(_numbers(b))
    table = Table(box=SIMPLE_HEAD)
    table.add_column("number", no_wrap=True)
    for name in (*names, "ratio"):
        table.add_column(name, justify="right", no_wrap=True)
    shown = 0
    for name in before | after:
        old, new = before.get(name), after.get(name)
        if old is not None and new is not None and abs(new - old) <= EQUAL * abs(old):
            continue
        shown += 1
        ratio = f"{new / old:.2f}x" if old and new is not None else ""
        table.add_row(name, _shown(name, old), _shown(name, new), ratio)
    equal = len(before | after) - shown
    if not shown:
        return f"equal: all {equal} numbers within {EQUAL:.1%}\n"
    console = Console(width=WIDTH, force_terminal=False, color_system=None)
    with console.capture() as captured:
        console.print(table)
    lines = [line.rstrip() for line in captured.get().splitlines() if line.strip()]
    return "\n".join([*lines, f"{equal} other numbers are equal within {EQUAL:.1%}"]) + "\n"


def _numbers(plan: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, float]]:
    """(path, value) of every number, such as ("programs/apply/flops", 0.0)."""
    for name, value in plan.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{path}{name}/")
        elif isinstance(value, int | float) and name not in SKIPPED:
            yield f"{path}{name}", float(value)


def _shown(name: str, value: float | None) -> str:
    last = name.rpartition("/")[2]
    if value is None:
        return "-"
    if last == "fits":
        return "yes" if value else "no"
    if "bytes" in last:
        return format_bytes(value)
    if last.endswith("_s") and not last.endswith("per_s"):
        return format_seconds(value)
    return f"{value:.3g}" if value >= 1e6 else f"{value:,.0f}"
