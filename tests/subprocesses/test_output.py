"""Tests of jaxrl/subprocesses/output.py."""

import os

import pytest

from jaxrl.subprocesses import output
from jaxrl.subprocesses.output import OutputLog, plain


def lines_of(*written, error=None, clock=lambda: 0.0):
    """The lines shown for the bytes written to a pipe."""
    lines = []

    def write(line):
        lines.append(line)
        if error:
            raise error

    reader, writer = os.pipe()
    thread = OutputLog(write, clock).follow(os.fdopen(reader, "rb"), "worker 3")
    with os.fdopen(writer, "wb") as file:
        for data in written:
            file.write(data)
    thread.join(10)
    return lines


def test_lines_have_the_name_of_the_worker():
    lines = lines_of(b"one\n\ntwo \xff\n", b"end")
    assert lines == ["worker 3: one", "worker 3: two \N{REPLACEMENT CHARACTER}", "worker 3: end"]


@pytest.mark.parametrize(
    "line, shown",
    [
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b[2J\x1b[1;1Htop", "top"),
        ("\x1b]0;title\x07text", "text"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1bcreset", "reset"),
        ("10%\r20%\r30%\r\n", "30%"),
        ("bell\x07, back\b, nul\0", "bell?, back?, nul?"),
        ("\x9b31mC1", "?31mC1"),
        ("override \u202e", "override ?"),
        ("a\tb é \N{ROCKET}", "a\tb é \N{ROCKET}"),
        ("\x1b", "?"),
    ],
)
def test_control_sequences_are_removed(line, shown):
    assert plain(line) == shown.replace("?", "\N{REPLACEMENT CHARACTER}")


def test_long_lines_are_split_and_a_flood_is_cut():
    lines = lines_of(b"x" * (output.MAX_LINE_BYTES + 5) + b"\n", b"flood\n" * 50_000)
    assert [len(line) for line in lines[:2]] == [output.MAX_LINE_BYTES + 10, 5 + 10]
    assert len(lines) == output.BURST_LINES  # 50,002 - 200 are left out


def test_the_number_of_lines_left_out_is_shown_with_the_next_line(monkeypatch):
    monkeypatch.setattr(output, "BURST_LINES", 1)
    clock = iter([0.0, 0.0, 0.0, 0.0, 5.0])  # at the start, then at each line
    lines = lines_of(b"a\nb\nc\nd\n", clock=lambda: next(clock))
    assert lines == ["worker 3: a", "(2 lines of workers left out)\nworker 3: d"]


def test_a_closed_output_of_the_trainer_does_not_stop_the_reader():
    lines = lines_of(b"a\n" * 10, b"end", error=BrokenPipeError())
    assert lines == ["worker 3: a"] * 10 + ["worker 3: end"]
