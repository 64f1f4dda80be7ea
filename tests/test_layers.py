"""Imports only go down: a room may import lower layers, never its siblings or anything above."""

import ast
import os
import pathlib
import re
import subprocess
import sys

import pytest

LAYERS = [  # lowest first; packages of one layer do not import each other
    {"jaxrl.json_text", "jaxrl.ending", "jaxrl.replaced_file"},
    {"sharding", "jaxrl.types"},
    {"jaxrl.config", "jaxrl.tool_calls"},
    {
        "jaxrl.kernels",
        "jaxrl.algorithms",
        "jaxrl.data",
        "jaxrl.subprocesses",
        "jaxrl.checkpoint",
        "jaxrl.tracking",
        "jaxrl.http",
    },
    {"jaxrl.models", "jaxrl.rewards", "jaxrl.report", "jaxrl.runtime"},
    {"jaxrl.layout", "jaxrl.environments", "jaxrl.teachers"},
    {"jaxrl.engine", "jaxrl.learner"},
    {"jaxrl.rollout"},
    {"jaxrl.planner"},
    {"jaxrl.trainer"},
    {
        "jaxrl.train",
        "jaxrl.sft",
        "jaxrl.dpo",
        "jaxrl.reward_model",
        "jaxrl.evaluate",
        "jaxrl.convert",
        "jaxrl.check_model",
        "jaxrl.migrate",
        "jaxrl.launch",
        "jaxrl.plan",
        "jaxrl.serve",
    },
    {"jaxrl.api"},
    {"jaxrl.cli", "jaxrl.doctor", "jaxrl.notebook"},
]
LAYER = {room: i for i, rooms in enumerate(LAYERS) for room in rooms}
WITHOUT_JAX = (
    "jaxrl/cli/",
    "jaxrl/tool_calls/",
    "jaxrl/data/",
    "jaxrl/rewards/",
    "jaxrl/environments/",
    "jaxrl/teachers/",
    "jaxrl/http/",
    "jaxrl/migrate/",
    "jaxrl/engine/pages.py",
    "jaxrl/engine/scheduler.py",
)
EXTRAS = {
    "IPython",
    "PIL",
    "gguf",
    "llguidance",
    "mlflow",
    "pandas",
    "ray",
    "reasoning_gym",
    "wandb",
}  # imported where they are used
ROOT = pathlib.Path(__file__).parents[1]
FILES = sorted([*ROOT.glob("jaxrl/**/*.py"), *ROOT.glob("sharding/**/*.py")])
SOURCES = {path.relative_to(ROOT): ast.parse(path.read_text()) for path in FILES}


def module_of(path: pathlib.Path) -> str:
    parts = path.with_suffix("").parts
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
            found.add("." * node.level + (node.module or ""))
            if node.module == "jaxrl":
                found |= {f"jaxrl.{alias.name}" for alias in node.names}
    return found


def test_every_room_has_a_layer():
    rooms = {room_of(module_of(path)) for path in SOURCES} - {"jaxrl"}
    assert rooms == set(LAYER), "give a new room or entry point its layer, and drop what is gone"


def test_imports_only_go_down():
    upward = []
    for path, tree in SOURCES.items():
        me = room_of(module_of(path))
        for other in {room_of(name) for name in imported(ast.walk(tree))} - {me}:
            if other in LAYER and LAYER[other] >= LAYER.get(me, 0):
                upward.append(f"{path} imports {other}")
    assert not upward


def test_imports_are_absolute_and_at_the_top_but_for_extras():
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    for path, tree in SOURCES.items():
        assert not {name for name in imported(ast.walk(tree)) if name.startswith(".")}, path
        inside = [node for node in ast.walk(tree) if isinstance(node, functions)]
        late = {name for node in inside for name in imported(ast.walk(node))}
        assert {name.split(".")[0] for name in late} <= EXTRAS, f"{path}: move up {late}"


def test_host_code_does_not_import_jax():
    for path, tree in SOURCES.items():
        if str(path).startswith(WITHOUT_JAX):
            tops = {name.split(".")[0] for name in imported(ast.walk(tree))}
            assert not tops & {"jax", "flax", "optax"}, path


def test_nothing_private_or_left_behind_of_jax_is_used():
    banned = (
        r"(?<![\"'])\bjax\._src\b|\bnnx\.(jit|grad|value_and_grad|scan|vmap|remat)\b|\bjax\.pmap\b"
    )
    for path in SOURCES:
        found = re.search(banned, (ROOT / path).read_text())
        assert not found, f"{path} has {found and found[0]}; use jax on the module's pytree"


def test_files_are_short_and_named_after_what_they_hold():
    for path in SOURCES:
        limit = 600 if "kernels" in path.parts else 450
        n_lines = len((ROOT / path).read_text().splitlines())
        assert n_lines <= limit, f"{path} has {n_lines} lines; split it along its nouns"
        assert not re.fullmatch(r"utils?|common|misc|helpers|.*_v\d+", path.stem), path


@pytest.mark.thorough
def test_importing_every_module_asks_no_device():
    modules = [module_of(path) for path in SOURCES if path.stem != "__main__"]
    code = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)"
    env = os.environ | {"JAX_PLATFORMS": "no_such_platform"}
    done = subprocess.run(
        [sys.executable, "-c", code, *modules], env=env, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
