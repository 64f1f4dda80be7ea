"""Tests of docker/: images, Kubernetes, XPK and SkyPilot files have valid fields and commands."""

import os
import pathlib
import re
import shlex
import subprocess
import tomllib
from typing import Any

import pytest
import yaml

from jaxrl.config.command_line import read_args
from jaxrl.config.keys import RunConfig
from jaxrl.config.resolve import resolve

ROOT = pathlib.Path(__file__).parents[1]
IMAGES = sorted((ROOT / "docker").glob("*.Dockerfile"))
JOBSETS = sorted((ROOT / "docker" / "kubernetes").glob("*.yaml"))
FILES = [
    *IMAGES,
    *JOBSETS,
    *(ROOT / "docker" / name for name in ("skypilot.yaml", "kubernetes/xpk.sh")),
]
# Fields by the kind of object, as the APIs define them (JobSet v1alpha2, batch/v1, v1).
FIELDS = {
    "": {"apiVersion", "kind", "metadata", "spec"},
    "spec": {"failurePolicy", "replicatedJobs"},
    "spec.replicatedJobs": {"name", "replicas", "template"},
    "spec.replicatedJobs.template.spec": {
        "parallelism", "completions", "completionMode", "backoffLimit", "template",
    },
    "spec.replicatedJobs.template.spec.template.spec": {
        "restartPolicy", "terminationGracePeriodSeconds", "nodeSelector", "containers",
        "securityContext", "volumes",
    },
    "spec.replicatedJobs.template.spec.template.spec.containers": {
        "name", "image", "command", "env", "resources", "securityContext", "volumeMounts",
    },
}  # fmt: skip


def run_of(words: list[str], n_devices: int | None = None, n_processes: int = 1) -> RunConfig:
    """The checked run of a command python -m jaxrl.train ..., without its devices if not given."""
    assert words[:3] == ["python", "-m", "jaxrl.train"]
    config, rest = read_args([word.replace("=configs/", f"={ROOT}/configs/") for word in words[3:]])
    assert rest == []
    return resolve(config, n_devices=n_devices, n_processes=n_processes)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_header_says_what_was_tried_and_its_commands_are_valid(path):
    header = re.match(r"(#.*\n)+", path.read_text())
    assert header and "# Tried: " in header[0] and "Not tried: " in header[0]
    text = header[0].replace("\\\n#", "")
    for command in re.findall(r"python -m jaxrl\.train .*", text):
        run_of(shlex.split(command))
    for name in re.findall(r"docker/[\w./]+\w", text):
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.name)
def test_an_image_is_built_from_the_lock_file_and_does_not_run_as_root(path):
    lines = path.read_text().replace("\\\n", "").splitlines()
    words = [line.split() for line in lines if line and not line.startswith("#")]
    bases = [line[1] for line in words if line[0] == "FROM"]
    assert len(bases) == 2 and all(re.search(r":\d[\w.-]+$", base) for base in bases)
    syncs = [line for line in words if line[:3] == ["RUN", "uv", "sync"]]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    known = project["project"]["optional-dependencies"] | project["dependency-groups"]
    for sync in syncs:
        assert "--locked" in sync and "--no-dev" in sync
        assert {sync[i + 1] for i, w in enumerate(sync) if w in ("--extra", "--group")} <= {*known}
    assert len(syncs) == 2
    ignored = (ROOT / ".dockerignore").read_text()
    for source in {
        w for line in words if line[0] == "COPY" and "--from" not in line[1] for w in line[1:-1]
    }:
        assert (ROOT / source).exists() and f"!{source}\n" in ignored
    assert words[-3] == ["USER", "1000"] and words[-1][0] == "CMD"
    run_of(yaml.safe_load(lines[-1].removeprefix("CMD ")))


def objects(tree: Any, place: str, at: str = "") -> list[dict]:
    """The objects at a dotted place; lists are passed through."""
    if isinstance(tree, list):
        return [found for one in tree for found in objects(one, place, at)]
    if at == place:
        return [tree]
    name = place.removeprefix(at).lstrip(".").partition(".")[0]
    return objects(tree[name], place, f"{at}.{name}".lstrip("."))


@pytest.mark.parametrize("path", JOBSETS, ids=lambda path: path.name)
def test_a_jobset_has_fields_of_its_api_and_a_run_for_its_devices(path):
    tree = yaml.safe_load(path.read_text())
    assert (tree["apiVersion"], tree["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    for place, known in FIELDS.items():
        assert all(set(one) <= known for one in objects(tree, place)), place
    (job,) = objects(tree, "spec.replicatedJobs.template.spec")
    (pod,) = objects(job, "template.spec")
    (container,) = pod["containers"]
    assert job["parallelism"] == job["completions"] and job["completionMode"] == "Indexed"
    assert (
        pod["securityContext"]["runAsNonRoot"] is True and pod["securityContext"]["runAsUser"] > 0
    )
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    (per_host,) = container["resources"]["limits"].values()
    words = [word.replace("$(JOB_COMPLETION_INDEX)", "3") for word in container["command"]]
    hosts = job["completions"]
    run = run_of(words, hosts * per_host, hosts)
    assert run.run_dir.startswith("/runs/")
    if run.distributed.coordinator:
        name, replicated = tree["metadata"]["name"], objects(tree, "spec.replicatedJobs")[0]["name"]
        assert run.distributed.coordinator == f"{name}-{replicated}-0-0.{name}:8476"
        assert (run.distributed.num_processes, run.distributed.process_id) == (hosts, 3)
    else:
        x, y, z = map(int, pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x"))
        assert x * y * z == hosts * per_host


def program(path: pathlib.Path) -> None:
    """A program that prints its arguments, one per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    path.chmod(0o755)


def test_the_task_of_skypilot_starts_one_process_per_node(tmp_path):
    task = yaml.safe_load((ROOT / "docker" / "skypilot.yaml").read_text())
    assert set(task) <= {
        "name", "num_nodes", "resources", "workdir", "file_mounts", "setup", "run", "envs",
    }  # fmt: skip
    nodes = task["num_nodes"]
    program(tmp_path / ".venv" / "bin" / "python")
    environment = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": str(nodes)}
    environment |= {"SKYPILOT_NODE_RANK": "1", "PATH": os.environ["PATH"]}
    printed = subprocess.run(
        ["bash", "-c", task["run"]], cwd=tmp_path, env=environment, check=True, capture_output=True
    )
    kind, per_node = task["resources"]["accelerators"].split(":")
    run = run_of(
        ["python", *printed.stdout.decode().split("\n")[:-1]], nodes * int(per_node), nodes
    )
    assert kind == "H100" and run.distributed.coordinator == "10.0.0.1:8476"
    assert (run.distributed.num_processes, run.distributed.process_id) == (nodes, 1)


def test_the_script_of_xpk_keeps_the_arguments_of_the_run(tmp_path):
    program(tmp_path / "xpk")
    script = ROOT / "docker" / "kubernetes" / "xpk.sh"
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "IMAGE": "registry/jaxrl:tpu"}
    arguments = ["--config=configs/grpo_7b.py", "--config.name=a b"]
    command = [str(script), "cluster", "name", "v5p-128", *arguments]
    printed = subprocess.run(command, env=environment, check=True, capture_output=True).stdout
    pairs = [w.partition("=") for w in printed.decode().splitlines() if w.startswith("--")]
    options = {name: value for name, _, value in pairs}
    assert options["--docker-image"] == "registry/jaxrl:tpu" and options["--tpu-type"] == "v5p-128"
    assert run_of(shlex.split(options["--command"])).name == "a b"
    assert subprocess.run([script], capture_output=True, check=False).returncode == 2
