"""Numbers of a comparison: curves with the spread of seeds, and final values with intervals."""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scipy.special import stdtrit

from jaxrl.io.tracking.json_lines import read_lines
from jaxrl.report.charts import all_charts
from jaxrl.report.record import Points, Record, mean, read_record

LEVEL = 0.95  # of all intervals
NORMAL = 1.959964  # quantile (1 + LEVEL) / 2 of the normal distribution
Band = list[tuple[int, float, float]]  # (step, lowest, highest)


@dataclasses.dataclass(frozen=True)
class ComparedRun:
    """A run folder."""

    name: str
    record: Record
    starts: list[dict[str, Any]]  # lines of starts.jsonl


@dataclasses.dataclass(frozen=True)
class Side:
    """One side of a comparison: runs that differ only in their seeds."""

    name: str
    runs: list[ComparedRun]

    def points(self, metric: str) -> list[Points]:
        """The points of each run that logged the metric."""
        return [
            points for run in self.runs if (points := finite(run.record.series.get(metric, [])))
        ]


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A final value, or a difference of two, with the half-width of its interval."""

    value: float
    half: float | None  # None if nothing estimates the spread
    variance: float = 0.0  # of the value
    df: int | float = math.inf  # degrees of freedom of the variance
    basis: str = ""  # of the interval: "seeds", "prompts"


def read_side(name: str, folders: Sequence[Path]) -> Side:
    """Reads the runs of a side. Raises ValueError for a folder that does not exist."""
    runs = [
        ComparedRun(
            folder.absolute().name, read_record(folder), read_lines(folder / "starts.jsonl")
        )
        for folder in folders
    ]
    return Side(name, runs)


def finite(points: Points) -> Points:
    return [(step, value) for step, value in points if math.isfinite(value)]


def curve(runs: Sequence[Points]) -> tuple[Points, Band]:
    """(mean over the runs, lowest and highest) at the steps that all of them logged.

    The band is empty for one run.
    """
    if not runs:
        return [], []
    by_step = [dict(points) for points in runs]
    steps = sorted(set.intersection(*(set(one) for one in by_step)))
    values = {step: [one[step] for one in by_step] for step in steps}
    line = [(step, sum(at) / len(at)) for step, at in values.items()]
    band = [(step, min(at), max(at)) for step, at in values.items()]
    return line, band if len(runs) > 1 else []


def last_common_step(sides: Sequence[Side], metric: str) -> int | None:
    """The last step at which all runs that have the metric logged it; None if there is none."""
    runs = [points for side in sides for points in side.points(metric)]
    if not runs:
        return None
    common = set.intersection(*({step for step, _ in points} for points in runs))
    return max(common, default=None)


def final_value(side: Side, metric: str, step: int) -> Estimate | None:
    """The metric of a side at `step`; None if no run has it.

    A validation metric is taken at the step; a training metric is the mean over the twentieth of
    the run that ends there. The interval of several seeds is Student's t over them. One seed has
    an interval only for metrics with a standard error over prompts (<name>_stderr).
    """
    values = [final_of_run(points, metric, step) for points in side.points(metric)]
    n = len(values)
    if not n:
        return None
    value = sum(values) / n
    if n > 1:
        variance = sum((v - value) ** 2 for v in values) / (n - 1) / n
        half = t_quantile(n - 1) * math.sqrt(variance)
        return Estimate(value, half, variance, n - 1, "seeds")
    stderr = dict(side.runs[0].record.series.get(f"{metric}_stderr", [])) if n == 1 else {}
    if len(side.runs) == 1 and math.isfinite(stderr.get(step, math.nan)):
        return Estimate(value, NORMAL * stderr[step], stderr[step] ** 2, math.inf, "prompts")
    return Estimate(value, None)


def final_of_run(points: Points, metric: str, step: int) -> float:
    until = [value for at, value in points if at <= step]
    last = 1 if metric.startswith("val/") else max(len(until) // 20, 1)
    found = mean(until[-last:])
    assert found is not None, "the points are finite and one is at `step` or before"
    return found


def difference(first: Estimate, second: Estimate) -> Estimate:
    """second - first, with Welch's interval if both have a variance."""
    value = second.value - first.value
    if first.half is None or second.half is None:
        return Estimate(value, None)
    parts = [(one.variance, one.df) for one in (first, second)]
    variance = sum(v for v, _ in parts)
    spread = sum(v**2 / df for v, df in parts)
    df = variance**2 / spread if spread else math.inf
    basis = " and ".join(dict.fromkeys((first.basis, second.basis)))
    return Estimate(value, t_quantile(df) * math.sqrt(variance), variance, df, basis)


def t_quantile(df: int | float) -> float:
    """Quantile (1 + LEVEL) / 2 of Student's t distribution."""
    return NORMAL if math.isinf(df) else float(stdtrit(df, (1 + LEVEL) / 2))


def compared_charts(sides: Sequence[Side]) -> list[dict[str, Any]]:
    """One chart per metric of the report that a run logged, with a line per side."""
    series = {n: p for side in sides for run in side.runs for n, p in run.record.series.items()}
    union = Record(config={}, series=series, samples=[])
    charts, seen = [], set()
    for chart in all_charts(union):
        for metric, label in chart.lines.items():
            lines = [compared_line(side, metric) for side in sides]
            if metric in seen or not any(line["points"] for line in lines):
                continue
            seen.add(metric)
            several = len(chart.lines) > 1
            charts.append(
                {
                    "title": f"{chart.title}: {label}" if several else chart.title,
                    "note": metric,
                    "unit": "" if chart.kind == "stack" else chart.unit,
                    "kind": "line" if chart.kind == "stack" else chart.kind,
                    "scale": chart.scale,
                    "lines": [line for line in lines if line["points"]],
                    "legend": True,
                }
            )
    return charts


def compared_line(side: Side, metric: str) -> dict[str, Any]:
    """The line of a side in the format of charts.js."""
    runs = side.points(metric)
    points, band = curve(runs)
    label = f"{side.name} ({len(runs)} runs)" if len(runs) > 1 else side.name
    every = max(math.ceil(len(points) / 800), 1)
    keep = slice((len(points) - 1) % every, None, every)  # with the last one
    return {"label": label, "points": points[keep], "band": band[keep] or None}


def config_rows(sides: Sequence[Side]) -> list[tuple[str, list[str]]]:
    """(key, its values per side) of the keys whose values are not the same in all runs."""
    keys = dict.fromkeys(key for side in sides for run in side.runs for key in run.record.config)
    rows = []
    for key in keys:
        if key in ("name", "run_dir", "resume"):
            continue
        values = [distinct([shown(run.record.config, key) for run in side.runs]) for side in sides]
        if any(one != values[0] or len(one) > 1 for one in values):
            rows.append((key, [", ".join(one) for one in values]))
    return rows


def version_rows(sides: Sequence[Side]) -> list[tuple[str, list[str], bool]]:
    """(what, its values per side, whether they differ) of commit, devices and packages."""
    names = dict.fromkeys(
        name
        for side in sides
        for run in side.runs
        for one in run.starts
        for name in flat_start(one)
    )
    rows = []
    for name in names:
        values = [
            distinct(
                [flat_start(one).get(name, "?") for run in side.runs for one in run.starts]
                or ["not recorded"]
            )
            for side in sides
        ]
        differs = any(one != values[0] or len(one) > 1 for one in values)
        rows.append((name, [", ".join(one) for one in values], differs))
    return rows


def flat_start(start: dict[str, Any]) -> dict[str, str]:
    """The entries of a line of starts.jsonl that a comparison shows."""
    versions = start.get("versions")
    flat = {"commit of jaxrl": start.get("commit") or "not in a clone"}
    flat |= {name: start.get(name, "?") for name in ("devices", "processes", "host")}
    flat |= versions if isinstance(versions, dict) else {}
    return {name: str(value) for name, value in flat.items()}


def distinct(values: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(values))


def shown(config: dict[str, Any], key: str) -> str:
    if key not in config:
        return "no such key"
    value = config[key]
    if isinstance(value, list):
        return "(" + ", ".join(map(str, value)) + ")"
    return json.dumps(value).strip('"') or "''"
