"""Tests of whole SFT runs on rows with images: learning what is seen, layouts, and refusals."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from jaxrl import sft
from jaxrl.config.resolve import default_config, resolve
from scripts.make_tiny_vlm import write_tiny_vlm
from tests.data.images.pictures import encoded

COLOURS = {"r": (255, 0, 0), "g": (0, 255, 0), "b": (0, 0, 255), "w": (255, 255, 255)}


@pytest.fixture(scope="session")
def vlm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vlm") / "model"
    write_tiny_vlm(folder, width=32, n_layers=1)
    return folder


@pytest.fixture
def config(tiny_config, vlm, tmp_path):
    """30 steps of 8 squares of a colour, in two sizes, whose name is the answer."""
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
    config.rollout.update(default_config().rollout)
    config.reward.update(default_config().reward)
    config.model.path = str(vlm)
    config.data.train = config.data.val = (str(tmp_path / "rows.parquet"),)
    config.data.chat_template = ""
    config.data.images = True
    config.data.prompts_per_step = 8
    config.data.max_prompt_len = 64
    config.total_steps = 30
    config.learner.lr = 1e-2
    return config


def values(run_dir, name):
    lines = map(json.loads, (Path(run_dir) / "metrics.jsonl").read_text().splitlines())
    return [line[name] for line in lines if name in line]


@pytest.mark.thorough
def test_sft_learns_what_only_the_image_shows(config):
    assert sft.train(resolve(config))
    before, after = values(config.run_dir, "val/nll")
    # A letter and the end of the turn. Blind to the image, no answer is better than this.
    assert after < 0.5 * np.log(len(COLOURS)) / 2 < before


@pytest.mark.thorough
def test_rows_and_meshes_give_the_same_losses(config, tmp_path):
    config.total_steps = 2
    losses = []
    for i, (budget, sizes) in enumerate([(256, {}), (128, {}), (128, {"fsdp": 2})]):
        config.run_dir = str(tmp_path / str(i))
        config.learner.token_budget = budget
        config.mesh.update(sizes)
        assert sft.train(resolve(config))
        losses.append(values(config.run_dir, "loss/nll"))
    np.testing.assert_allclose(losses[1:], losses[:1] * 2, rtol=1e-5)


def test_images_without_the_key_are_refused(config):
    config.data.images = False
    with pytest.raises(ValueError, match=r"data\.images"):
        sft.train(resolve(config))


def test_a_model_without_a_tower_is_refused(config, tiny_model):
    config.model.path = str(tiny_model)
    with pytest.raises(ValueError, match="image"):
        sft.train(resolve(config))
