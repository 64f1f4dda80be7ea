"""Tests of notebooks/: their form, their settings on the planner's side, and an execution."""

import json
from pathlib import Path

import pyarrow
import pytest
from pyarrow import csv, parquet

from jaxrl.config.command_line import config_of
from jaxrl.config.resolve import check_devices, resolve
from jaxrl.models.mesh_check import check_mesh
from jaxrl.notebook import planning
from jaxrl.planner.model_shape import model_shape
from jaxrl.planner.options import read
from sharding import make_mesh
from sharding.rules import TRAIN
from tests.engine.engine_cases import FAMILIES
from tests.models.resized import resized
from tests.trainer.conftest import write_model

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PLANNED = {  # notebook -> (shapes of the models that it names, number of devices)
    "kaggle_v5e8_gemma3_1b": (("google/gemma-3-1b-it",), 8),
    "colab_gpu_qwen3": (("Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B"), 1),
}
TINY = {  # totals of the executed quickstart
    "data.prompts_per_step": 2,
    "rollout.n": 2,
    "rollout.max_num_seqs": 4,
    "learner.token_budget": 256,
    "reward.workers": 1,
}
ONE_DIGIT = {"data.val": "task:addition?digits=1&size=2&split=val"}
SIZES = dict(L=2, V=260, max_len=1024)  # a byte is a token
TINY_MODELS = {
    "kaggle_v5e8_gemma3_1b": resized(FAMILIES["gemma3"], **SIZES, windows=(32, 0)),
    "colab_gpu_qwen3": resized(FAMILIES["qwen3"], **SIZES),
}
ROWS = [{"question": f"What is\n{i} + 1?", "answer": f"Count.\n#### {i + 1}"} for i in range(1, 9)]
SHORT = {  # for questions that are bytes, and one step
    "data.max_response_len": 16,
    "learner.mini_batch_prompts": 2,
    "learner.token_budget": 1024,
    "learner.warmup_steps": 0,
}
CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- "<|im_start|>" + message.role + "\\n" + message.content + "<|im_end|>\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- "<|im_start|>assistant\\n" }}
{%- if enable_thinking is false %}{{- "<think>\\n\\n</think>\\n\\n" }}{%- endif %}
{%- endif %}
"""


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


@pytest.fixture
def kernel_outputs(monkeypatch):
    """Executes a notebook with other parameters; returns the outputs of each cell by its source."""
    nbclient, nbformat = map(pytest.importorskip, ("nbclient", "nbformat"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")

    def execute(name, parameters):
        notebook = nbformat.read(ROOT / f"notebooks/{name}.ipynb", as_version=4)
        tags = [cell.metadata.get("tags", ()) for cell in notebook.cells]
        at = next(i for i, found in enumerate(tags) if "parameters" in found)
        source = "\n".join(f"{name} = {value!r}" for name, value in parameters.items())
        notebook.cells.insert(at + 1, nbformat.v4.new_code_cell(source))
        nbclient.NotebookClient(notebook, timeout=3600, kernel_name="python3").execute()
        return {c.source.strip(): c.outputs for c in notebook.cells if c.cell_type == "code"}

    return execute


@pytest.mark.slow
def test_the_quickstart_runs_with_tiny_totals(tmp_path, kernel_outputs):
    values = {"STEPS": 1, "RUN_DIR": str(tmp_path / "run"), "OVERRIDES": TINY | ONE_DIGIT}
    outputs = kernel_outputs("quickstart", values)
    assert "<iframe" in outputs["run.report()"][-1]["data"]["text/html"]
    assert (tmp_path / "run" / "export" / "config.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY_MODELS)
def test_a_notebook_for_accelerators_runs_on_cpu(name, tmp_path, kernel_outputs, monkeypatch):
    """With a tiny model, eight questions and one step; every other setting and cell is its own."""
    n_devices, folder = PLANNED[name][1], tmp_path / "out"
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", str(n_devices))
    model = write_model(tmp_path / "model", TINY_MODELS[name])
    (model / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    values = {
        "MODEL": str(model),
        "FOLDER": str(folder),
        "TOPOLOGY": f"cpu:{n_devices}",
        "STEPS": 1,
        "OVERRIDES": TINY | SHORT,
    }
    table = pyarrow.Table.from_pylist(ROWS)
    for key, split in (("data.train", "train"), ("data.val", "test")):
        csv.write_csv(table, tmp_path / f"main_{split}.csv")
        if "DATA" in settings(ROOT / f"notebooks/{name}.ipynb"):
            values["DATA"] = str(tmp_path)
        else:  # a dataset of the hub
            parquet.write_table(table, tmp_path / f"{split}.parquet")
            values["OVERRIDES"][key] = (str(tmp_path / f"{split}.parquet"),)
    outputs = kernel_outputs(name, values)
    shown = {source.split("(")[0]: str(found[-1]) for source, found in outputs.items() if found}
    assert "reward" in shown["run.samples[-20:]"] and "<iframe" in shown["run.report"]
    assert "pass_at_4" in shown["jaxrl.evaluate"]
    (samples,) = folder.glob("*/samples.jsonl")
    found = {json.loads(line)["answer"] for line in samples.read_text().splitlines()}
    assert found >= {row["answer"] for row in ROWS}  # of the validation, with their line breaks
    exported = {path.parent.name for path in folder.glob("*-gsm8k*/*config.json")}
    assert len(exported) == 2 and any(name.endswith("-adapter") for name in exported)
