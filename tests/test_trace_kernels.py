"""Busy and idle time of programs (scripts/trace_kernels.py)."""

import pytest

from scripts.trace_kernels import COPIES, Event, by_program


def test_idle_time_counts_for_the_program_that_ends_it():
    found = by_program(
        [
            Event(0, 10, "score", "product"),
            Event(8, 20, "score", "norm"),  # overlaps
            Event(25, 30, "score", "product"),
            Event(31, 33, "", "MemcpyH2D"),
            Event(40, 50, "update", "product"),
            Event(52, 60, "score", "product"),
        ]
    )
    assert list(found) == ["score", COPIES, "update"]
    score, copies, update = found.values()
    assert (score.n_calls, score.busy, score.idle, score.before) == (2, 33, 7, 2)
    assert (copies.n_calls, copies.busy, copies.idle) == (0, 2, 1)
    assert (update.n_calls, update.busy, update.idle, update.before) == (1, 10, 7, 7)
    assert score.kernels == {"product": [10, 5, 8], "norm": [12]}


def test_a_folder_without_a_trace_is_an_error(tmp_path, monkeypatch):
    from scripts import trace_kernels

    monkeypatch.setattr("sys.argv", ["trace_kernels.py", str(tmp_path)])
    with pytest.raises(SystemExit, match="no trace"):
        trace_kernels.main()
