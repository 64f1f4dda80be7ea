"""The page that compares runs: final values, curves, configuration and versions."""

import html
from collections.abc import Sequence
from pathlib import Path

from jaxrl.report.comparison import (
    Estimate,
    Side,
    compared_charts,
    config_rows,
    difference,
    final_value,
    last_common_step,
    version_rows,
)
from jaxrl.report.document import document, fill
from jaxrl.report.page import number

HEADLINES = ("val/reward", "val/nll", "val/loss", "val/accuracy", "reward/mean", "loss/nll")
MISSING = "<td>not logged</td>"


def write_comparison(sides: Sequence[Side], out: Path) -> Path:
    """Writes the page, which embeds its data, style and script, to `out`.

    The first side is the one that the others are compared with.
    """
    out.write_text(render_comparison(sides), encoding="utf-8")
    return out


def render_comparison(sides: Sequence[Side]) -> str:
    names = " against ".join(side.name for side in sides)
    main = fill(
        "compare.html",
        NOTICE="".join(f'<p class="notice">{html.escape(line)}</p>' for line in notices(sides)),
        VALUES=values_table(sides),
        CONFIG=config_table(sides),
        VERSIONS=versions_table(sides),
    )
    subtitle = "; ".join(map(describe, sides))
    charts = {"charts": compared_charts(sides)}
    return document(names, subtitle, main, data=charts, scripts=("charts.js", "compare.js"))


def describe(side: Side) -> str:
    runs = ", ".join(f"{run.name} ({run.record.last_step} steps)" for run in side.runs)
    return f"{side.name}: {runs}"


def notices(sides: Sequence[Side]) -> list[str]:
    """What limits the comparison."""
    found = []
    runs = [run for side in sides for run in side.runs]
    if empty := [run.name for run in runs if not run.record.series]:
        found.append(f"There are no metrics yet in {', '.join(empty)}.")
    lengths = {run.record.last_step for run in runs if run.record.series}
    if len(lengths) > 1:
        found.append(
            "The runs have different lengths. Final values are those of the last step that all of "
            f"them logged; the shortest run has {min(lengths)} steps, the longest {max(lengths)}."
        )
    if any(len(side.runs) == 1 for side in sides):
        found.append(
            "A side with one run shows no spread of seeds. Give several runs per side to see "
            "whether a difference is larger than that of two seeds."
        )
    for side in sides:
        seeds = [str(run.record.config.get("seed")) for run in side.runs if run.record.config]
        if len(set(seeds)) < len(seeds):
            found.append(f"{side.name} has several runs of one seed: {', '.join(seeds)}.")
    return found


def values_table(sides: Sequence[Side]) -> str:
    """Final values: the headline metrics, and all others folded."""
    logged = sorted({name for side in sides for run in side.runs for name in run.record.series})
    logged = [name for name in logged if not name.endswith("_stderr")]
    passes = [name for name in logged if name.removeprefix("val/").startswith("pass_at_")]
    first = [name for name in HEADLINES if name in logged] + passes
    rest = [name for name in logged if name not in first]
    head = "".join(f"<th>{html.escape(side.name)}</th>" for side in sides)
    deltas = "".join(
        f"<th>{html.escape(side.name)} - {html.escape(sides[0].name)}</th>" for side in sides[1:]
    )
    top = f"<tr><th>metric</th><th>step</th>{head}{deltas}</tr>"

    def table(names: list[str]) -> str:
        rows = "".join(value_row(sides, name) for name in names)
        return f'<table class="values">{top}{rows}</table>'

    others = f"<details><summary>{len(rest)} further metrics</summary>{table(rest)}</details>"
    if not logged:
        return '<p class="notice">No metrics to compare.</p>'
    return f'<div class="scroll">{table(first)}</div>{others if rest else ""}'


def value_row(sides: Sequence[Side], metric: str) -> str:
    step = last_common_step(sides, metric)
    if step is None:
        cells = "".join(
            "<td>no common step</td>" if side.points(metric) else MISSING for side in sides
        )
        empty = "<td></td>" * (len(sides) - 1)
        return f"<tr><td>{html.escape(metric)}</td><td></td>{cells}{empty}</tr>"
    values = [final_value(side, metric, step) for side in sides]
    cells = "".join(MISSING if one is None else f"<td>{estimate(one)}</td>" for one in values)
    cells += "".join(difference_cell(values[0], one) for one in values[1:])
    return f"<tr><td>{html.escape(metric)}</td><td>{step:,}</td>{cells}</tr>"


def difference_cell(first: Estimate | None, second: Estimate | None) -> str:
    """The difference; bold if its interval does not contain 0."""
    if first is None or second is None:
        return "<td></td>"
    found = difference(first, second)
    clear = found.half is not None and abs(found.value) > found.half
    sign = "+" if found.value > 0 else ""
    return f"<td{' class=clear' if clear else ''}>{sign}{estimate(found)}</td>"


def estimate(one: Estimate) -> str:
    if one.half is None:
        return precise(one.value)
    basis = html.escape(one.basis)
    return f"{precise(one.value)} ± {precise(one.half)} <small>{basis}</small>"


def precise(value: float) -> str:
    """As `number`, and values near 0 with an exponent."""
    return number(value) if value == 0 or abs(value) >= 1e-3 else f"{value:.1e}"


def config_table(sides: Sequence[Side]) -> str:
    rows = config_rows(sides)
    if not any(run.record.config for side in sides for run in side.runs):
        return '<p class="notice">There is no config.json in these run folders.</p>'
    if not rows:
        return '<p class="notice">The configurations are the same.</p>'
    return side_table(sides, "key", rows)


def versions_table(sides: Sequence[Side]) -> str:
    rows = version_rows(sides)
    if not rows:
        return '<p class="notice">There is no starts.jsonl in these run folders.</p>'
    differing = [(name, values) for name, values, differs in rows if differs]
    same = [(name, values) for name, values, differs in rows if not differs]
    shown = (
        side_table(sides, "version", differing)
        if differing
        else '<p class="notice">Commit, devices and package versions are the same.</p>'
    )
    summary = f"<summary>{len(same)} equal entries</summary>"
    folded = f"<details>{summary}{side_table(sides, 'version', same)}</details>"
    return shown + (folded if same else "")


def side_table(sides: Sequence[Side], title: str, rows: Sequence[tuple[str, list[str]]]) -> str:
    """A table with a column per side."""
    head = "".join(f"<th>{html.escape(side.name)}</th>" for side in sides)
    lines = (
        f"<tr><td>{html.escape(name)}</td>"
        + "".join(f"<td>{html.escape(value)}</td>" for value in values)
        + "</tr>"
        for name, values in rows
    )
    table = f'<table class="values"><tr><th>{title}</th>{head}</tr>{"".join(lines)}</table>'
    return f'<div class="scroll">{table}</div>'
