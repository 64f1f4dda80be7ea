"""Tests of whole runs that train the vision tower: what changes, exports, layouts and resume."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from jaxrl import sft
from jaxrl.config.resolve import default_config, resolve
from jaxrl.models.files.quantized.tensors import read_tensor
from jaxrl.models.files.weight_files import named_infos
from jaxrl.models.vision.names import is_of_tower
from jaxrl.trainer.export import export_checkpoint
from scripts.make_tiny_vlm import write_tiny_vlm
from tests.data.images.pictures import encoded

COLOURS = {"r": (255, 0, 0), "g": (0, 255, 0), "b": (0, 0, 255), "w": (255, 255, 255)}
VISION = r"visual\..*"


@pytest.fixture(scope="session")
def vlm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vlm") / "model"
    write_tiny_vlm(folder, width=32, n_layers=2)
    return folder


@pytest.fixture
def config(tiny_config, vlm, tmp_path):
    """2 steps of GRPO on squares of a colour, in two sizes, that train the whole model."""
    rows = [
        {
            "question": "<image>?",
            "answer": name,
            "images": [{"bytes": encoded(Image.new("RGB", (width, 16), colour))}],
        }
        for name, colour in COLOURS.items()
        for width in (16, 24)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    config = tiny_config
    config.model.path = str(vlm)
    config.model.freeze_vision = "none"
    config.data.train = config.data.val = (str(tmp_path / "rows.parquet"),)
    config.data.chat_template = ""
    config.data.images = True
    config.data.max_prompt_len = 64
    config.total_steps = 2
    return config


@pytest.fixture
def supervised(config):
    config.rollout.update(default_config().rollout)
    config.reward.update(default_config().reward)
    config.data.prompts_per_step = 8
    return config


def values(run_dir, name):
    lines = map(json.loads, (Path(run_dir) / "metrics.jsonl").read_text().splitlines())
    return [line[name] for line in lines if name in line]


def tensors(folder):
    return {name: np.asarray(read_tensor(info)) for name, info in named_infos(Path(folder))}


def changed(before, after):
    """(names of the tower's tensors that differ, all other names that do)."""
    before, after = tensors(before), tensors(after)
    assert before.keys() == after.keys()
    names = {name for name in before if not np.array_equal(before[name], after[name])}
    return {n for n in names if is_of_tower(n)}, {n for n in names if not is_of_tower(n)}


@pytest.mark.thorough
@pytest.mark.parametrize("freeze", ["none", "tower"])
def test_sft_changes_and_exports_what_is_not_frozen(supervised, vlm, freeze):
    supervised.model.freeze_vision = freeze
    assert sft.train(resolve(supervised))
    hf = Path(supervised.run_dir) / "hf"
    of_tower, others = changed(vlm, hf)
    projector = {n for n in of_tower if "merger" in n}
    every = {n for n in tensors(vlm) if is_of_tower(n)}
    assert others and projector == {n for n in every if "merger" in n}
    assert of_tower == (every if freeze == "none" else projector)
    norms = values(supervised.run_dir, "optim/vision_grad_norm")
    whole = values(supervised.run_dir, "optim/grad_norm")
    assert all(0 < part < all_ for part, all_ in zip(norms, whole, strict=True))
    export_checkpoint(Path(supervised.run_dir), "last", hf.parent / "again")
    assert changed(hf, hf.parent / "again") == (set(), set())
