"""Imports only go down: a room may import lower layers, never its siblings or anything above."""

import ast
import os
import pathlib
import re
import subprocess
import sys

import pytest

LAYERS = [  # lowest first; rooms of one layer do not import each other
    {"sharding", "jaxrl.types", "jaxrl.schema"},
    {"jaxrl.keys"},
    {"jaxrl.config"},
    {
        "jaxrl.kernels",
        "jaxrl.algorithms",
        "jaxrl.data",
        "jaxrl.rewards",
        "jaxrl.io",
    },
    {"jaxrl.models", "jaxrl.report"},
    {"jaxrl.rollout", "jaxrl.learner"},
    {"jaxrl.trainer"},
    {"jaxrl.config_docs"},
    {"jaxrl.flags"},
    {"jaxrl.train", "jaxrl.convert"},
]
LAYER = {room: i for i, rooms in enumerate(LAYERS) for room in rooms}
WITHOUT_JAX = (
    "jaxrl/data/",
    "jaxrl/rewards/",
    "jaxrl/rollout/pages.py",
    "jaxrl/rollout/scheduler.py",
)
EXTRAS = {"gguf", "mlflow", "ray", "reasoning_gym", "wandb"}  # imported where they are used
ROOT = pathlib.Path(__file__).parents[1]
SOURCES = sorted([*ROOT.glob("jaxrl/**/*.py"), *ROOT.glob("sharding/**/*.py")])
each_source = pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))


def module_of(path: pathlib.Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    return ".".join(module.split(".")[: 2 if module.startswith("jaxrl") else 1])


def imported(nodes) -> set[str]:
    """Modules that the import statements among `nodes` name."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found.add(node.module or "")
            if node.module == "jaxrl":
                found |= {f"jaxrl.{alias.name}" for alias in node.names}
    return found


def test_every_room_has_a_layer():
    rooms = {room_of(module_of(path)) for path in SOURCES} - {"jaxrl"}
    assert rooms == set(LAYER), "give a new room or entry point its layer, and drop what is gone"


@each_source
def test_imports_only_go_down(path):
    me = room_of(module_of(path))
    if me == "jaxrl":
        return
    for other in {room_of(name) for name in imported(ast.walk(ast.parse(path.read_text())))}:
        if other in LAYER and other != me:
            assert LAYER[other] < LAYER[me], f"{me} must not import {other}"


@each_source
def test_imports_are_at_the_top_but_for_extras(path):
    tree = ast.parse(path.read_text())
    inside = {
        name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for name in imported(ast.walk(node))
    }
    late = {name for name in inside if name.split(".")[0] not in EXTRAS}
    assert not late, f"move {late} to the top of the file"


@each_source
def test_host_code_does_not_import_jax(path):
    if str(path.relative_to(ROOT)).startswith(WITHOUT_JAX):
        used = imported(ast.walk(ast.parse(path.read_text())))
        assert not {name for name in used if name.split(".")[0] in ("jax", "flax")}


@each_source
def test_nothing_private_or_left_behind_of_jax_is_used(path):
    banned = (
        r"(?<![\"'])\bjax\._src\b|\bnnx\.(jit|grad|value_and_grad|scan|vmap|remat)\b|\bjax\.pmap\b"
    )
    found = re.search(banned, path.read_text())
    assert not found, f"{found and found[0]}: use the jax transformation on the module's pytree"


@each_source
def test_files_are_short_and_named_after_what_they_hold(path):
    limit = 600 if "kernels" in path.parts else 450
    assert len(path.read_text().splitlines()) <= limit, "split the file along its nouns"
    assert not re.fullmatch(r"utils|util|common|misc|helpers|.*_v\d+", path.stem)


def test_importing_every_module_asks_no_device():
    modules = " ".join(module_of(path) for path in SOURCES)
    code = "import importlib, sys\nfor name in sys.argv[1].split(): importlib.import_module(name)"
    env = os.environ | {"JAX_PLATFORMS": "no_such_platform"}
    done = subprocess.run(
        [sys.executable, "-c", code, modules], env=env, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
