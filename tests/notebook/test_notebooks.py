"""Tests of notebooks/: their form, their settings on the planner's side, and an execution."""

import importlib.util
import json
import os
from pathlib import Path

import pytest

from jaxrl.config.command_line import config_of
from jaxrl.config.resolve import check_devices, resolve
from jaxrl.models.mesh_check import check_mesh
from jaxrl.notebook import planning
from jaxrl.planner.model_shape import model_shape
from jaxrl.planner.options import read
from sharding import make_mesh
from sharding.rules import TRAIN

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PLANNED = {  # notebook -> (shapes of the models that it names, number of devices)
    "kaggle_v5e8_gemma3_1b": (("google/gemma-3-1b-it",), 8),
    "colab_gpu_qwen3": (("Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B"), 1),
}
TINY = {  # totals of the executed quickstart
    "data.val": "task:addition?digits=1&size=2&split=val",
    "data.prompts_per_step": 2,
    "rollout.n": 2,
    "rollout.max_num_seqs": 4,
    "learner.token_budget": 256,
    "reward.workers": 1,
}


def cells(notebook, kind, tag=None):
    """The sources of the cells of a kind; with a tag only those."""
    found = json.loads(notebook.read_text())["cells"]
    return [
        "".join(cell["source"])
        for cell in found
        if cell["cell_type"] == kind and (not tag or tag in cell["metadata"].get("tags", ()))
    ]


def settings(notebook, **names):
    """The names that the cells "parameters" and "settings" define; `names` replace parameters."""
    (parameters,), (last,) = (
        cells(notebook, "code", "parameters"),
        cells(notebook, "code", "settings"),
    )
    namespace: dict = {}
    exec(parameters, namespace)
    namespace |= names
    exec(last, namespace)
    return namespace


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_the_form_of_version_4_and_code_that_compiles(notebook):
    found = json.loads(notebook.read_text())
    assert (found["nbformat"], found["nbformat_minor"]) == (4, 5)
    assert found["metadata"]["kernelspec"]["name"] == "python3"
    assert len({cell["id"] for cell in found["cells"]}) == len(found["cells"])
    assert cells(notebook, "markdown")[0].startswith("# ")
    for cell in found["cells"]:
        wanted = {"cell_type", "id", "metadata", "source"}
        wanted |= {"execution_count", "outputs"} if cell["cell_type"] == "code" else set()
        assert set(cell) == wanted
    for source in cells(notebook, "code"):
        lines = [line.replace("%pip", "pass  #") for line in source.splitlines()]
        compile("\n".join(lines), notebook.name, "exec")


def test_the_settings_of_the_quickstart_are_valid():
    found = settings(ROOT / "notebooks/quickstart.ipynb", STEPS=48, OVERRIDES={"rollout.n": 4})
    cfg = resolve(config_of("quickstart", found["SETTINGS"]))
    assert cfg.total_steps == 48 and cfg.rollout.n == 4


@pytest.mark.parametrize(
    ("name", "model"), [(name, model) for name, (models, _) in PLANNED.items() for model in models]
)
def test_the_planner_accepts_the_settings_for_the_chips(name, model, monkeypatch):
    found = settings(ROOT / f"notebooks/{name}.ipynb", MODEL=model)
    seen = []

    def check(arguments):
        seen.append(read(arguments))  # of the program; exits if one is invalid
        return 0, "tables", ""

    monkeypatch.setattr(planning, "_run", check)
    plan = planning.plan(found["CONFIG"], found["TOPOLOGY"], overrides=found["SETTINGS"])
    assert plan.fits and repr(plan) == "tables"
    (planned,) = seen
    assert planned.options["topology"] == found["TOPOLOGY"]
    assert planned.cfg == resolve(config_of(found["CONFIG"], found["SETTINGS"]))
    n_devices = PLANNED[name][1]
    check_devices(planned.cfg, n_devices)
    mesh = make_mesh(fsdp=n_devices)
    check_mesh(model_shape(planned.cfg.model.path), mesh.shape, TRAIN)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("nbclient") is None, reason="nbclient is missing")
def test_the_quickstart_runs_with_tiny_totals(tmp_path):
    import nbclient
    import nbformat

    notebook = nbformat.read(ROOT / "notebooks/quickstart.ipynb", as_version=4)
    at = next(i for i, c in enumerate(notebook.cells) if "parameters" in c.metadata.get("tags", ()))
    values = {"STEPS": 1, "RUN_DIR": str(tmp_path / "run"), "OVERRIDES": TINY}
    source = "\n".join(f"{name} = {value!r}" for name, value in values.items())
    notebook.cells.insert(at + 1, nbformat.v4.new_code_cell(source))
    os.environ.setdefault("PYTHONPATH", str(ROOT))
    nbclient.NotebookClient(notebook, timeout=3600, kernel_name="python3").execute()
    outputs = {c.source.strip(): c.outputs for c in notebook.cells if c.cell_type == "code"}
    assert "<iframe" in outputs["run.report()"][-1]["data"]["text/html"]
    assert (tmp_path / "run" / "export" / "config.json").is_file()
