"""The files that a reader of a run meets: those that open it, and those of one steady step.

`uv run pytest -n 0 -s -m thorough tests/trainer/test_executed_files.py` prints them with the number
of their functions. The opening traces and compiles programs, models and kernels included; the step
calls them. The limits may fall; they rise only if a file becomes too long and is split, or a
new feature has its own.
"""

import collections
import contextlib
import sys
from pathlib import Path

import jax
import pytest

from jaxrl.config.resolve import resolve
from jaxrl.trainer.rl_step import train_step
from jaxrl.trainer.setup.opening import open_run

ROOT = Path(__file__).parents[2]
MAX_OPENING, MAX_STEP = 193, 63  # files


@contextlib.contextmanager
def executed_functions():
    """The functions of jaxrl and sharding that any thread starts in the block, by file."""
    tool, events = sys.monitoring.PROFILER_ID, sys.monitoring.events
    found = collections.defaultdict(set)

    def record(code, offset):
        path = Path(code.co_filename)
        if path.is_relative_to(ROOT / "jaxrl") or path.is_relative_to(ROOT / "sharding"):
            found[str(path.relative_to(ROOT))].add(code.co_qualname)
        return sys.monitoring.DISABLE

    sys.monitoring.use_tool_id(tool, "executed functions")
    sys.monitoring.register_callback(tool, events.PY_START, record)
    sys.monitoring.restart_events()
    sys.monitoring.set_events(tool, events.PY_START)
    try:
        yield found
    finally:
        sys.monitoring.set_events(tool, events.NO_EVENTS)
        sys.monitoring.free_tool_id(tool)


def report(title, found):
    """Prints the files with the number of their functions."""
    print(f"\n{title}: {sum(map(len, found.values()))} functions in {len(found)} files")
    for path, functions in sorted(found.items()):
        print(f"{len(functions):5} {path}")


@pytest.mark.thorough
def test_a_reader_of_a_run_and_of_a_step_meets_a_limited_number_of_files(tiny_config):
    jax.clear_caches()  # what earlier tests have traced would not run
    cfg = resolve(tiny_config)
    with contextlib.ExitStack() as stack:
        with executed_functions() as opening:
            run = stack.enter_context(open_run(cfg))
        train_step(run)
        with executed_functions() as step:
            train_step(run)
    report("opening a run", opening)
    report("one step", step)
    assert len(opening) <= MAX_OPENING
    assert len(step) <= MAX_STEP
