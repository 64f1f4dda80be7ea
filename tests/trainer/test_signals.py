"""Signals while a run imports, loads and compiles; tests/test_ending.py has the mechanism."""

import signal
import time
from pathlib import Path

import pytest

from jaxrl.runtime.folder_lock import NAME
from tests.trainer.test_train import start_process


def children(pid: int) -> list[int]:
    """Processes that any thread of a process has started."""
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for path in lists for child in path.read_text().split()]


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("line", ["jaxrl: loading", "run folder", "mesh", "compiling all"])
def test_a_signal_during_the_start_is_one_line_and_leaves_nothing(
    tiny_config, tmp_path, line, name
):
    process = start_process(tiny_config, tmp_path)
    assert process.stdout is not None
    for text in process.stdout:
        if line in text:
            break
    workers = children(process.pid)
    assert workers or line in ("jaxrl: loading", "run folder")
    process.send_signal(signal.Signals[name])
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.Signals[name], output
    last = f"{name}: stopped at once; the files written before are intact"
    assert output.count(last) == 1 and "Traceback" not in output and "error" not in output
    assert not (Path(tiny_config.run_dir) / NAME).exists()
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < deadline, "the workers of the run are still there"
        time.sleep(0.05)
