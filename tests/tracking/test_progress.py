"""Tests of jaxrl/tracking/progress.py: status lines, bars and remaining times."""

import io

import pytest
from rich.console import Console

from jaxrl.tracking import progress as module
from jaxrl.tracking.progress import Progress, bar_text, duration


class Clock:
    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module.time, "monotonic", clock.monotonic)
    return clock


def pipe() -> Console:
    return Console(file=io.StringIO(), width=100)


def lines(progress) -> list[str]:
    return progress.console.file.getvalue().splitlines()


def test_a_pipe_gets_plain_lines_at_a_moderate_rate(clock):
    with Progress(pipe(), quiet=False, interval_s=10.0) as progress:
        progress.status("model SmolLM2-135M, 134.5 M parameters")
        progress.steps(0, 4)
        with progress.phase("rollout", total=64) as bar:
            for _ in range(16):
                clock.now += 1.0
                bar.advance(4, "412 tok/s")
    assert [line.strip() for line in lines(progress)] == [
        "0 s  model SmolLM2-135M, 134.5 M parameters",
        "10 s  step 1/4: rollout 40/64, 412 tok/s, 10 s, 6 s left",
    ]
    assert progress.console.file.getvalue().isprintable() is False  # newlines only
    assert all(line.isprintable() for line in lines(progress))


def test_the_remaining_time_of_a_phase_is_its_pace_times_the_remaining_count(clock):
    with Progress(pipe(), quiet=False) as progress, progress.phase("update", total=8) as bar:
        assert bar.remaining_s is None
        clock.now += 6.0
        bar.update(2)
        assert bar.remaining_s == 18.0  # 3 s each, 6 left


def test_the_remaining_time_of_a_resumed_run_counts_only_its_own_steps(clock):
    with Progress(pipe(), quiet=False) as progress:
        progress.steps(10, 20)
        assert progress.run_remaining_s is None
        clock.now += 30.0
        progress.steps(12, 20)
        assert progress.run_remaining_s == 120.0  # 15 s a step, 8 left


def test_waiting_prints_its_text_first_and_the_seconds_at_the_end(clock):
    with Progress(pipe(), quiet=False) as progress, progress.waiting("compiling update [1, 512]"):
        clock.now += 12.0
        assert lines(progress)[0].endswith("compiling update [1, 512] ...")
    assert lines(progress)[1].endswith("compiling update [1, 512] ... 12.0 s")


def test_only_slow_compilations_are_reported(clock):
    with Progress(pipe(), quiet=False) as progress:
        progress.compiled("add", 0.1)
        progress.compiled("jit(update)", 12.3)
    assert [line.strip() for line in lines(progress)] == ["0 s  compiled jit(update) in 12.3 s"]


def test_a_terminal_shows_live_bars_until_the_phase_ends(clock):
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    with Progress(console, quiet=False) as progress:
        progress.steps(0, 2)
        with progress.phase("rollout", total=4) as bar:
            bar.advance(1, "9 tok/s")
            console.print(progress._render())
            shown = console.file.getvalue()
            assert "rollout" in shown
            assert "1/4, 9 tok/s" in shown
            assert "0/2 steps" in shown
        assert len(progress._render().rows) == 1  # the run


def test_nothing_is_printed_under_pytest_or_by_other_processes(monkeypatch):
    assert Progress(pipe()).quiet
    monkeypatch.delitem(module.sys.modules, "pytest")
    assert not Progress(pipe()).quiet
    monkeypatch.setattr(module, "is_main_process", lambda: False)
    with Progress(pipe()) as progress, progress.phase("x", 1) as bar, progress.waiting("y"):
        bar.advance()
        progress.status("z")
    assert lines(progress) == []


def test_the_bar_of_a_phase_that_raises_is_removed():
    progress = Progress(pipe())
    with pytest.raises(KeyError), progress.phase("x", 1):
        raise KeyError
    assert len(progress._render().rows) == 0


@pytest.mark.parametrize("seconds, shown", [(8.4, "8 s"), (125.0, "2:05"), (3725.0, "1:02:05")])
def test_durations_are_formatted_like_a_clock(seconds, shown):
    assert duration(seconds) == shown


def test_a_bar_is_filled_in_proportion_to_the_count():
    assert bar_text(1, 2).spans[0].end == module.BAR_CHARS // 2
    assert len(bar_text(9, 0).plain) == module.BAR_CHARS
