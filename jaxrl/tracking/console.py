"""Console output of a run: a table with one line per step, and sampled completions."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import rich
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from jaxrl.config.keys import LogConfig
from jaxrl.tracking.progress import duration
from jaxrl.tracking.samples import printable

HEADER_EVERY = 20


def compact(value: float) -> str:
    """A number in about five characters: 0.431, 9.06, 412, 1e-05."""
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size and (size < 1e-3 or size >= 1e5):
        return f"{value:.0e}"
    return f"{value:.3f}" if size < 1 else f"{value:.2f}" if size < 10 else f"{value:.0f}"


def one_decimal(value: float) -> str:
    return f"{value:.1f}"


# title, metric names (the first one present is shown), width, format
Column = tuple[str, tuple[str, ...], int, Callable[[float], str]]
COMMON_COLUMNS: tuple[Column, ...] = (
    ("grad", ("optim/grad_norm",), 7, compact),
    ("lr", ("optim/lr",), 7, compact),
    ("tok/s", ("perf/tokens_per_s", "rollout/tokens_per_s"), 7, compact),
    ("s", ("time/step_s",), 7, one_decimal),
)
RL_COLUMNS: tuple[Column, ...] = (
    ("reward", ("reward/mean",), 7, compact),
    ("len", ("rollout/response_len",), 7, one_decimal),
    ("kl", ("loss/kl", "reward/kl", "loss/approx_kl"), 7, compact),
    ("entropy", ("loss/entropy",), 8, compact),
    ("clip", ("loss/clip_fraction",), 7, compact),
    ("mismatch", ("mismatch/logp_diff_mean",), 9, compact),
    *COMMON_COLUMNS,
)
OFFLINE_COLUMNS: tuple[Column, ...] = (
    ("loss", ("loss/nll", "preference/loss"), 8, compact),
    ("accuracy", ("preference/accuracy",), 10, compact),
    ("margin", ("preference/margin",), 8, compact),
    ("entropy", ("loss/entropy",), 9, compact),
    *COMMON_COLUMNS,
)


def cell(
    names: Sequence[str], values: dict[str, float], width: int, show: Callable[[float], str]
) -> str:
    """The first of the metrics that is in `values`, right-aligned; "-" if none is."""
    found = next((values[name] for name in names if name in values), None)
    return f"{'-' if found is None else show(found):>{width}}"


class ConsoleLogger:
    """Prints metrics, text, and sampled completions every `cfg.samples_every` steps."""

    def __init__(self, cfg: LogConfig, total_steps: int = 0, console: Console | None = None):
        self.cfg, self.total_steps = cfg, total_steps
        self.console = console or rich.get_console()
        self._n_lines = 0
        self._seconds: list[float] = []

    def metrics(self, step: int, values: dict[str, float]) -> None:
        is_step = any(not name.startswith(("val/", "time/")) for name in values)
        if is_step:
            self._step_line(step, values)
        if any(name.startswith("val/") for name in values):
            self._validation_line(step, values)

    def samples(self, step: int, records: list[dict[str, Any]]) -> None:
        every = self.cfg.samples_every
        if not every or not records or (step % every and records[0].get("kind") != "val"):
            return
        for record in representative_samples(records, self.cfg.samples):
            self._print(sample_panel(step, record, min(self.console.width, 100)))

    def text(self, text: str) -> None:
        self._print(Text(text))

    def close(self) -> None:
        pass

    def _step_line(self, step: int, values: dict[str, float]) -> None:
        rewarded = values.keys() & {"reward/mean", "reward/errors"}
        columns = RL_COLUMNS if rewarded else OFFLINE_COLUMNS
        count = f"{step}/{self.total_steps}" if self.total_steps else str(step)
        if self._n_lines % HEADER_EVERY == 0:
            titles = "".join(f"{title:>{width}}" for title, _, width, _ in columns)
            self._print(Text(f"{'step':>9}{titles}{'left':>9}", "bold cyan"))
        self._n_lines += 1
        cells = (cell(names, values, width, show) for _, names, width, show in columns)
        self._print(Text(f"{count:>9}{''.join(cells)}{self._left(step, values):>9}"))

    def _left(self, step: int, values: dict[str, float]) -> str:
        """Remaining time of the run, at the median pace of the last 32 steps."""
        self._seconds = [*self._seconds[-31:], values.get("time/step_s", math.nan)]
        if not self.total_steps or not math.isfinite(
            pace := sorted(self._seconds)[len(self._seconds) // 2]
        ):
            return "-"
        return duration(pace * (self.total_steps - step))

    def _validation_line(self, step: int, values: dict[str, float]) -> None:
        shown = {n.removeprefix("val/"): v for n, v in values.items() if n.startswith("val/")}
        first = {name: shown.pop(name) for name in ("reward", "nll", "loss") if name in shown}
        headline = {n: v for n, v in (first | shown).items() if is_headline(n)}
        line = "  ".join(f"{name} {compact(value)}" for name, value in headline.items())
        seconds = f"  ({values['time/val_s']:.1f} s)" if "time/val_s" in values else ""
        self._print(
            Text.assemble(("validation", "bold green"), f" after step {step}:  {line}{seconds}")
        )

    def _print(self, what: Text | Panel) -> None:
        self.console.print(what, soft_wrap=isinstance(what, Text))


def is_headline(metric: str) -> bool:
    """Whether the validation line has the metric: over all prompts, or a source's reward."""
    overall = "/" not in metric and not metric.endswith("_stderr")
    return overall or metric.endswith("/reward")


def representative_samples(records: list[dict[str, Any]], n: int) -> list[dict[str, Any]]:
    """`n` records: the one with the highest reward, the one with the lowest, then in order."""
    by_reward = sorted(range(len(records)), key=lambda i: -records[i].get("reward", 0.0))
    order = dict.fromkeys([by_reward[0], by_reward[-1], *range(len(records))])
    return [records[i] for i in list(order)[:n]]


def sample_panel(step: int, record: dict[str, Any], width: int) -> Panel:
    good = record.get("reward", 0.0) > 0
    body = Text.assemble(
        (printable(record.get("prompt", "")).strip(), "dim"),
        "\n",
        (printable(record.get("completion", "")), "green" if good else "yellow"),
    )
    error = (
        f"  error: {printable(record['error'].partition(chr(10))[0], 120)}"
        if record.get("error")
        else ""
    )
    answer = printable(str(record.get("answer", "")), 120)
    title = f"{record.get('kind', 'train')} sample, step {step}"
    reward = compact(record.get("reward", 0.0))
    summary = f"reward {reward}  answer {answer}  {record.get('finish', '')}{error}"
    return Panel(
        body,
        title=Text(title),
        subtitle=Text(summary),
        title_align="left",
        subtitle_align="left",
        border_style="green" if good else "bright_black",
        width=width,
    )
