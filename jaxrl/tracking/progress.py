"""Progress of a run: status lines, and bars with the remaining time."""

import contextlib
import sys
import time
from collections.abc import Iterator

import rich
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from jaxrl.tracking.notebook import NotebookLive, in_notebook
from sharding.hosts import is_main_process

BAR_CHARS = 24
MIN_COMPILE_S = 1.0  # programs that compile faster get no status line


def duration(seconds: float) -> str:
    """ "8 s", "2:05", "1:02:05"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


class Bar:
    """The bar of one running phase. Created by Progress.phase."""

    def __init__(self, owner: "Progress", name: str, total: int):
        self.name, self.total, self.done, self.info = name, total, 0, ""
        self.start = time.monotonic()
        self._owner = owner

    def advance(self, n: int = 1, info: str = "") -> None:
        """Adds `n` to the count; `info` is shown after the count, e.g. "412 tok/s"."""
        self.update(self.done + n, info)

    def update(self, done: int, info: str = "") -> None:
        """Sets the count to `done`."""
        self.done, self.info = done, info or self.info
        self._owner.bar_moved(self)

    @property
    def remaining_s(self) -> float | None:
        """Remaining seconds at the pace so far; None before the first update."""
        if not 0 < self.done <= self.total:
            return None
        return (time.monotonic() - self.start) / self.done * (self.total - self.done)

    def line(self) -> str:
        left = f", {duration(self.remaining_s)} left" if self.remaining_s is not None else ""
        info = f", {self.info}" if self.info else ""
        spent = duration(time.monotonic() - self.start)
        return f"{self.name} {self.done}/{self.total}{info}, {spent}{left}"


class Progress:
    """Prints status lines and bars: live in a terminal and in a notebook, else a line every
    `interval_s`.

    Silent under pytest and in processes other than the main process. The default console is rich's
    global one, so that lines printed by loggers appear above the bars.
    """

    def __init__(
        self, console: Console | None = None, *, quiet: bool | None = None, interval_s: float = 15.0
    ):
        self.console = console or rich.get_console()
        self.quiet = ("pytest" in sys.modules or not is_main_process()) if quiet is None else quiet
        self.interval_s = interval_s
        self._start = self._last_line = time.monotonic()
        self._bars: list[Bar] = []
        self._waiting: list[tuple[str, float]] = []
        self._steps: tuple[int, int] | None = None  # done, total
        self._first: tuple[int, float] | None = None  # first reported `done`, and when
        self._live: Live | NotebookLive | None = None

    def __enter__(self) -> "Progress":
        if self.quiet:
            return self
        if in_notebook():
            self._live = NotebookLive(self._render)
        elif self.console.is_terminal:
            self._live = Live(
                console=self.console,
                get_renderable=self._render,
                refresh_per_second=4,
                transient=True,
            )
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def status(self, text: str) -> None:
        """Prints a permanent line, prefixed with the time since the start."""
        if not self.quiet:
            since = f"{duration(time.monotonic() - self._start):>7}"
            line = Text.assemble((since, "dim"), "  ", text)
            self.console.print(line, soft_wrap=True)

    def compiled(self, name: str, seconds: float) -> None:
        """Reports a compilation, unless it was fast."""
        if seconds >= MIN_COMPILE_S:
            self.status(f"compiled {name} in {seconds:.1f} s")

    @contextlib.contextmanager
    def waiting(self, text: str) -> Iterator[None]:
        """Reports a block without a count, e.g. "compiling update [1, 512] ... 12.0 s".

        An error in the block gets the text as a note.
        """
        start = time.monotonic()
        self._waiting.append((text, start))
        if self._live is None:
            self.status(f"{text} ...")
        try:
            yield
            self.status(f"{text} ... {time.monotonic() - start:.1f} s")
        except Exception as error:
            error.add_note(f"while {text}")
            raise
        finally:
            self._waiting.pop()

    @contextlib.contextmanager
    def phase(self, name: str, total: int) -> Iterator[Bar]:
        """A bar for `total` sequences, micro-batches, ..., shown until the block ends."""
        bar = Bar(self, name, total)
        self._bars.append(bar)
        try:
            yield bar
        finally:
            self._bars.remove(bar)

    def steps(self, done: int, total: int) -> None:
        """Reports the steps of the run. Call it before the first step and after each one."""
        self._steps = (done, total)
        if self._first is None:
            self._first = (done, time.monotonic())

    @property
    def run_remaining_s(self) -> float | None:
        """Remaining seconds of the run at the pace of this process; None before its first step."""
        if self._steps is None or self._first is None or self._steps[0] <= self._first[0]:
            return None
        done, total = self._steps
        return (time.monotonic() - self._first[1]) / (done - self._first[0]) * (total - done)

    def bar_moved(self, bar: Bar) -> None:
        """In a pipe, prints the bar's line if nothing was printed for `interval_s`."""
        now = time.monotonic()
        quiet_since = max(self._last_line, bar.start)
        if self._live is None and not self.quiet and now - quiet_since >= self.interval_s:
            self._last_line = now
            self.status(f"{self._step_prefix()}{bar.line()}")

    def _step_prefix(self) -> str:
        if self._steps is None:
            return ""
        done, total = self._steps
        return f"step {min(done + 1, total)}/{total}: "

    def _render(self) -> Table:
        table = Table.grid(padding=(0, 1))
        now = time.monotonic()
        for text, start in self._waiting:
            table.add_row(text, Text("...", "dim"), duration(now - start))
        for bar in self._bars:
            table.add_row(
                Text(bar.name, "bold"), bar_text(bar.done, bar.total), bar.line().partition(" ")[2]
            )
        if self._steps is not None:
            done, total = self._steps
            left = (
                f", {duration(self.run_remaining_s)} left"
                if self.run_remaining_s is not None
                else ""
            )
            table.add_row(Text("run", "bold"), bar_text(done, total), f"{done}/{total} steps{left}")
        return table


def bar_text(done: int, total: int) -> Text:
    """A bar of `BAR_CHARS` characters."""
    full = round(BAR_CHARS * min(done / max(total, 1), 1.0))
    return Text.assemble(("━" * full, "green"), ("━" * (BAR_CHARS - full), "bright_black"))
