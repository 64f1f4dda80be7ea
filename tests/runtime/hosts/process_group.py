"""Runs of several operating system processes, each with simulated devices."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

CLOCK = ("time", "_per_s", "host_fraction")
ENGINE = (
    "cache_utilization",
    "prefix_hit_rate",
    "running",
    "waiting",
    "_tokens",
    "rollout/padding_fraction",
)
END_S = 240
ROOT = Path(__file__).parents[3]


class Group:
    """The processes of one run."""

    def __init__(
        self,
        config,
        folder: Path,
        *,
        n: int,
        n_devices: int,
        per_process,
        folders,
        program: str = "jaxrl.train",
    ):
        path = write_config(config, folder)
        self.processes = []
        for i in range(n):
            mine = [f"--config={path}", *per_process.get(i, ())]
            if n > 1:
                mine += [f"--config.distributed.{name}={value}" for name, value in self.place(n, i)]
            cwd = folders[i] if folders else None
            self.processes.append(start(program, mine, folder, i, n_devices=n_devices, cwd=cwd))

    def place(self, n: int, i: int):
        if i == 0:
            self.port = free_port()
        return (
            ("coordinator", f"localhost:{self.port}"),
            ("num_processes", n),
            ("process_id", i),
            ("heartbeat_timeout_s", 10),
        )

    def outputs(self, timeout_s: float = END_S) -> list[str]:
        """The output of each process, after all have ended."""
        deadline = time.monotonic() + timeout_s
        for process in self.processes:
            try:
                process.wait(max(deadline - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired as late:
                raise AssertionError("\n".join(self.texts())) from late
        return self.texts()

    def texts(self) -> list[str]:
        return [process.log.read_text() for process in self.processes]

    def finish(self) -> list[str]:
        """outputs() of a run in which every process must exit with status 0."""
        texts = self.outputs()
        assert [process.returncode for process in self.processes] == [0] * len(texts), "\n".join(
            texts
        )
        return texts

    def wait_for_step(self, run_dir, step: int, timeout_s: float = END_S) -> None:
        """Waits until metrics.jsonl has a training line of `step`."""
        path, deadline = Path(run_dir) / "metrics.jsonl", time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            assert all(p.poll() is None for p in self.processes), "\n".join(self.texts())
            lines = path.read_text().splitlines() if path.exists() else []
            whole = [json.loads(line) for line in lines if line.endswith("}")]
            if any(line["step"] >= step and "reward/mean" in line for line in whole):
                return
            time.sleep(0.05)
        raise AssertionError(f"no step {step} within {timeout_s} s: " + "\n".join(self.texts()))

    def kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def write_config(config, folder: Path) -> Path:
    path = folder / "config.py"
    path.write_text(
        "from jaxrl.config import default_config\n"
        f"VALUES = {config.to_dict()!r}\n"
        "def get_config():\n"
        "    config = default_config()\n"
        "    config.update(VALUES)\n"
        "    return config\n"
    )
    return path


def start(
    program: str, args, folder: Path, i: int, *, n_devices: int, cwd: Path | None
) -> subprocess.Popen:
    """Starts one process; its output goes to a file, `log`, because a full pipe would block it.

    It has the test's cache of compiled C kernels, which take a minute of CPU time to compile.
    """
    env = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(n_devices)}
    env["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # half of the time is compilation
    caches = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    env |= {"PATH": "/usr/bin:/bin", "HOME": str(folder), "XDG_CACHE_HOME": caches}
    log = folder / f"process_{i}_{time.monotonic_ns()}.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", program, *args],
            env=env | {"PYTHONPATH": str(ROOT)},
            cwd=cwd,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    process.log = log
    return process


def weights(run_dir):
    return load_file(Path(run_dir) / "hf" / "model.safetensors")


def assert_close(a, b, atol):
    a, b = weights(a), weights(b)
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_allclose(a[name], b[name], rtol=0, atol=atol, err_msg=name)


def metrics(run_dir):
    """metrics.jsonl without the metrics that depend on time or on how engines share sequences."""
    lines = (Path(run_dir) / "metrics.jsonl").read_text().splitlines()
    return [
        {
            k: v
            for k, v in json.loads(line).items()
            if not any(word in k for word in (*CLOCK, *ENGINE))
        }
        for line in lines
    ]


def samples(run_dir):
    return (Path(run_dir) / "samples.jsonl").read_text()


def assert_same_run(run, reference):
    """Asserts equal numbers up to 1e-6, and identical samples."""
    assert samples(run) == samples(reference)
    ours, theirs = metrics(run), metrics(reference)
    assert [line.keys() for line in ours] == [line.keys() for line in theirs]
    for one, other in zip(ours, theirs, strict=True):
        for name in one:
            assert one[name] == pytest.approx(other[name], rel=1e-5, abs=1e-6), name
    assert_close(run, reference, atol=1e-6)
