"""Tests of scripts/launch_*.sh, with fake gcloud, scontrol and srun that run their arguments."""

import os
import subprocess
from pathlib import Path

import pytest

from jaxrl.config.command_line import parse

ROOT = Path(__file__).parents[3]


@pytest.fixture
def folder(tmp_path):
    """A clone whose Python prints its arguments, one per line, and a bin/ for fake commands."""
    python = tmp_path / "clone of it" / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    program(python, 'printf "%s\\n" "$@"')
    return tmp_path


def program(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


def run(script: str, *args: str, cwd: Path, path: Path, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", str(ROOT / "scripts" / script), *args],
        cwd=cwd,
        env={"PATH": f"{path}:{os.environ['PATH']}", **env},
        capture_output=True,
        text=True,
    )


def test_every_host_of_a_tpu_pod_gets_the_same_command(folder):
    program(folder / "bin" / "gcloud", 'echo "$5 $6 $7"; bash -c "${8#--command=}"')
    args = ("--config=configs/quickstart.py", "--config.data.train=task:addition?digits=1,2&size=8")
    done = run(
        "launch_tpu_pod.sh", "pod", "zone-a", str(folder / "clone of it"), *args,
        cwd=folder, path=folder / "bin",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    where, *command = done.stdout.splitlines()
    assert where == "pod --zone=zone-a --worker=all"
    assert command == ["-m", "jaxrl.train", *args, "--config.distributed.start=on"]


def test_every_node_of_a_slurm_job_gets_the_coordinator_and_its_rank(folder):
    program(folder / "bin" / "scontrol", "echo node07; echo node08")
    srun = 'shift 2; for i in 0 1; do SLURM_PROCID=$i "$@"; done'
    program(folder / "bin" / "srun", srun)
    done = run(
        "launch_slurm.sh", "--config=configs/quickstart.py", "--config.name=a b",
        cwd=folder / "clone of it", path=folder / "bin",
        SLURM_JOB_NODELIST="node[07-08]", SLURM_JOB_ID="123456", SLURM_NTASKS="2",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    commands = [lines[: len(lines) // 2], lines[len(lines) // 2 :]]
    for i, command in enumerate(commands):
        assert command[:2] == ["-m", "jaxrl.train"]
        assert command[2:4] == ["--config=configs/quickstart.py", "--config.name=a b"]
        cfg = parse(command[2:])
        assert cfg.distributed.coordinator == "node07:23456"
        assert (cfg.distributed.num_processes, cfg.distributed.process_id) == (2, i)


@pytest.mark.parametrize("script", ["launch_tpu_pod.sh", "launch_slurm.sh"])
def test_a_script_without_arguments_prints_its_usage(script, tmp_path):
    done = run(script, cwd=tmp_path, path=tmp_path)
    assert done.returncode == 2 and f"scripts/{script}" in done.stderr
