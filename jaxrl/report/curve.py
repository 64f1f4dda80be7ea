"""The learning curve as an SVG: training reward and validation accuracy, for a README."""

import html
import math
from pathlib import Path

from jaxrl.report.record import Points, Record, read_record, thin

WIDTH, HEIGHT = 720, 300
LEFT, RIGHT, TOP, BOTTOM = 52, 16, 44, 38
STYLE = """
.ink { fill: #1d1f23; } .soft { fill: #646a73; } .grid { stroke: #e3e3df; }
.train { stroke: #2f6fdb; } .val { stroke: #1f9d6a; }
.dot { fill: #1f9d6a; } .key { fill: #2f6fdb; }
@media (prefers-color-scheme: dark) {
.ink { fill: #e8e9ec; } .soft { fill: #9aa1ac; } .grid { stroke: #343942; }
.train { stroke: #6fa3ff; } .val { stroke: #58cf9e; }
.dot { fill: #58cf9e; } .key { fill: #6fa3ff; } }
text { font: 13px system-ui, -apple-system, "Segoe UI", sans-serif; }
path { fill: none; stroke-linejoin: round; }
"""


def write_curve_svg(run_dir: str | Path, out: str | Path) -> Path:
    """Writes the picture to `out`; it follows the reader's light or dark color scheme.

    Raises ValueError if the run has logged neither reward/mean nor val/reward.
    """
    record = read_record(Path(run_dir))
    if not any(finite(record.series.get(name, [])) for name in ("reward/mean", "val/reward")):
        raise ValueError(
            f"{run_dir} has no reward/mean or val/reward in metrics.jsonl; train at least one "
            f"step, with 'jsonl' in config.log.loggers"
        )
    out = Path(out)
    out.write_text(curve_svg(record), encoding="utf-8")
    return out


def curve_svg(record: Record) -> str:
    """The picture as SVG text."""
    train, val = (finite(record.series.get(name, [])) for name in ("reward/mean", "val/reward"))
    x_low, x_high = span([step for step, _ in train + val])
    values = [v for _, v in train + val]
    low, high = min(0.0, *values), max(1.0, *values)

    def at(step: int, value: float) -> tuple[float, float]:
        x = LEFT + (step - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)
        return x, HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    def path(points: Points, style: str) -> str:
        steps = "L".join("{:.1f} {:.1f}".format(*at(*point)) for point in points)
        return f'<path d="M{steps}" {style}/>' if points else ""

    dots = "".join(
        '<circle class="dot" cx="{:.1f}" cy="{:.1f}" r="4"/>'.format(*at(*p)) for p in val
    )
    name = html.escape(str(record.config.get("name", "run")))
    body = [
        f'<text x="{LEFT}" y="24" class="ink" style="font-weight:600">{name}</text>',
        *legend(bool(train), bool(val)),
        *grid(low, high, x_low, x_high, at),
        path(thin(train), 'class="train" stroke-width="1.2" stroke-opacity="0.3"'),
        path(thin(smoothed(train)), 'class="train" stroke-width="2.2"'),
        path(val, 'class="val" stroke-width="2.2"'),
        dots,
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="Reward and validation accuracy over steps"><style>{STYLE}</style>'
        f"{''.join(body)}</svg>\n"
    )


def finite(points: Points) -> Points:
    return [(step, value) for step, value in points if math.isfinite(value)]


def span(steps: list[int]) -> tuple[int, int]:
    low, high = min(steps), max(steps)
    return (low, high) if high > low else (low, low + 1)


def smoothed(points: Points) -> Points:
    """Moving average over a window of a twentieth of the run."""
    half = len(points) // 40
    windows = (points[max(i - half, 0) : i + half + 1] for i in range(len(points)))
    return [
        (step, sum(v for _, v in window) / len(window))
        for (step, _), window in zip(points, windows, strict=True)
    ]


def legend(train: bool, val: bool) -> list[str]:
    entries = [("key", "training reward", train), ("dot", "validation accuracy", val)]
    out, x = [], float(WIDTH - RIGHT)
    for css, words, there in reversed(entries):
        if there:
            x -= 7.0 * len(words) + 26
            out.append(f'<rect class="{css}" x="{x}" y="15" width="10" height="10" rx="3"/>')
            out.append(f'<text x="{x + 16}" y="24" class="soft">{words}</text>')
    return out


def grid(low: float, high: float, x_low: int, x_high: int, at, *, unit: str = "step") -> list[str]:
    out = []
    for i in range(5):
        value = low + (high - low) * i / 4
        _, y = at(x_low, value)
        out.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        out.append(
            f'<text class="soft" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">'
            f"{value:.2f}</text>"
        )
    for step in sorted({round(x_low + (x_high - x_low) * i / 6) for i in range(7)}):
        x, _ = at(step, low)
        anchor = "end" if step == x_high else "middle"  # long numbers end with the picture
        out.append(
            f'<text class="soft" x="{x:.1f}" y="{HEIGHT - 19}" text-anchor="{anchor}">'
            f"{step:,}</text>"
        )
    out.append(
        f'<text class="soft" x="{WIDTH - RIGHT}" y="{HEIGHT - 4}" text-anchor="end">{unit}</text>'
    )
    return out
