"""Reads the metrics and samples of a run folder, and thins them for the report."""

import collections
import dataclasses
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jaxrl.json_text import parse_json
from jaxrl.tracking.first_samples import MarkedText, read_first_samples
from jaxrl.tracking.json_lines import read_lines

Points = list[tuple[int, float]]  # (step, value), ascending

MAX_POINTS = 800  # per series
MAX_SAMPLES = 3000
MAX_SAMPLE_CHARS = 6_000_000  # of all samples together
MAX_STEP = 2**53  # a larger integer is not exact in the page's script


@dataclasses.dataclass(frozen=True)
class Record:
    """Config, metrics and samples of a run."""

    config: dict[str, Any]  # dotted key -> value; {} if there is no config.json
    series: dict[str, Points]  # metric -> all points
    samples: list[dict[str, Any]]
    run_dir: Path | None = None  # where the images of the samples are
    first_samples: list[tuple[int, list[MarkedText]]] = dataclasses.field(default_factory=list)

    @property
    def last_step(self) -> int:
        return max((points[-1][0] for points in self.series.values()), default=0)

    def first(self, metric: str, mean_of: int = 1) -> float | None:
        return mean([v for _, v in self.series.get(metric, ())][:mean_of])

    def last(self, metric: str, mean_of: int = 1) -> float | None:
        return mean([v for _, v in self.series.get(metric, ())][-mean_of:])

    def total(self, metrics: Iterable[str]) -> float:
        values = (v for name in metrics for _, v in self.series.get(name, ()))
        return sum((v for v in values if math.isfinite(v)), 0.0)


def read_record(run_dir: Path) -> Record:
    """Reads the files of a run folder. Raises ValueError if `run_dir` is not a folder.

    Another program may have written them: lines without a valid step are left out.
    """
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise ValueError(f"{run_dir} is not a folder; pass a run folder, e.g. runs/quickstart")
    samples = read_lines(run_dir / "samples.jsonl")
    return Record(
        config=read_config(run_dir / "config.json"),
        series=read_series(read_lines(run_dir / "metrics.jsonl")),
        samples=[sample for sample in samples if step_of(sample) is not None],
        run_dir=run_dir,
        first_samples=read_first_samples(run_dir),
    )


def read_config(path: Path) -> dict[str, Any]:
    """Dotted key -> value; {} for a file that is missing or no JSON object."""
    try:
        values = parse_json(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return flatten(values) if isinstance(values, dict) else {}


def step_of(line: dict[str, Any]) -> int | None:
    """The step of a line, 0 if it has none; None if it is not a number of steps."""
    step = line.get("step", 0)
    return step if type(step) is int and 0 <= step <= MAX_STEP else None


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested JSON objects as one level of dotted keys."""
    out: dict[str, Any] = {}
    for name, value in values.items():
        nested = isinstance(value, dict)
        out |= flatten(value, f"{prefix}{name}.") if nested else {f"{prefix}{name}": value}
    return out


def read_series(lines: list[dict[str, Any]]) -> dict[str, Points]:
    """Metric -> points; if a step was logged twice, the later line counts."""
    values: dict[str, dict[int, float]] = collections.defaultdict(dict)
    for line in lines:
        if (step := step_of(line)) is None:
            continue
        for name, value in line.items():
            if name not in ("step", "time") and (number := as_float(value)) is not None:
                values[name][step] = number
    return {name: sorted(by_step.items()) for name, by_step in sorted(values.items())}


def as_float(value: Any) -> float | None:
    """The value of a number or of a string such as "NaN"; else None."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def mean(values: Sequence[float]) -> float | None:
    finite = [v for v in values if math.isfinite(v)]
    return sum(finite) / len(finite) if finite else None


def thin(points: Points, limit: int = MAX_POINTS, *, largest: bool = False) -> Points:
    """At most `limit` points, each the mean (or maximum) of a window of equal size."""
    if len(points) <= limit:
        return points
    size = math.ceil(len(points) / limit)
    out: Points = []
    for i in range(0, len(points), size):
        part = points[i : i + size]
        finite = [v for _, v in part if math.isfinite(v)]
        value = (max(finite) if largest else sum(finite) / len(finite)) if finite else math.nan
        out.append((part[-1][0], value))
    return out


def thin_samples(samples: list[dict[str, Any]], limit: int = MAX_SAMPLES) -> list[dict[str, Any]]:
    """At most `limit` samples.

    Keeps the first and the last step of each kind, then the same number from every step.
    """
    if len(samples) <= limit:
        return samples
    steps: dict[tuple[str, int], list[int]] = collections.defaultdict(list)
    for i, sample in enumerate(samples):
        steps[str(sample.get("kind")), step_of(sample) or 0].append(i)
    kept: set[int] = set()
    for kind in {kind for kind, _ in steps}:
        of_kind = sorted(step for k, step in steps if k == kind)
        for step in {of_kind[0], of_kind[-1]}:
            kept |= set(steps[kind, step][: limit // 8])
    round_robin = (
        indices[at]
        for at in range(max(map(len, steps.values())))
        for indices in spread(sorted(steps.values()), limit)
        if at < len(indices)
    )
    for i in round_robin:
        if len(kept) >= limit:
            break
        kept.add(i)
    return [samples[i] for i in sorted(kept)]


def spread(items: list[Any], limit: int) -> list[Any]:
    """At most `limit` items, evenly spaced."""
    if len(items) <= limit:
        return items
    return [items[i * (len(items) - 1) // (limit - 1)] for i in range(limit)]


def cut(text: str, limit: int) -> str:
    """The text, with its middle replaced by a note if it is longer than `limit`."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters left out ...]\n{text[-half:]}"
