"""Tests of whole offline runs on rows with images: learning what is seen, layouts, refusals."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from jaxrl import dpo, reward_model, sft
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


@pytest.fixture
def pairs(config, tmp_path):
    """The same squares; the rejected answer is the name of another colour."""
    rows = [
        {
            "question": "<image>?",
            "chosen": name,
            "rejected": other,
            "images": [{"bytes": encoded(Image.new("RGB", (width, 16), COLOURS[name]))}],
        }
        for name, other in zip(COLOURS, [*COLOURS][1:] + [*COLOURS][:1], strict=True)
        for width in (16, 24)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "pairs.parquet")
    config.data.train = config.data.val = (str(tmp_path / "pairs.parquet"),)
    config.preference.beta = 1.0
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


@pytest.mark.thorough
def test_dpo_prefers_what_only_the_image_shows(pairs):
    assert dpo.train(resolve(pairs))
    # Every letter is chosen in two pairs and rejected in two: blind to the image, half are right.
    assert values(pairs.run_dir, "val/accuracy")[-1] == 1.0
    assert values(pairs.run_dir, "val/loss")[-1] < 0.5 * np.log(2)


@pytest.mark.thorough
@pytest.mark.parametrize("loss", ["dpo", "kto"])
def test_rows_and_meshes_give_the_same_preference_losses(pairs, tmp_path, loss):
    pairs.preference.loss, pairs.total_steps = loss, 3
    losses = []
    for i, (budget, sizes) in enumerate([(256, {}), (128, {}), (128, {"fsdp": 2})]):
        pairs.run_dir = str(tmp_path / str(i))
        pairs.learner.token_budget = budget
        pairs.mesh.update(sizes)
        assert dpo.train(resolve(pairs))
        losses.append(values(pairs.run_dir, "preference/loss"))
    assert abs(losses[0][0] - losses[0][2]) > 1e-3
    np.testing.assert_allclose(losses[1:], losses[:1] * 2, rtol=1e-5)


def test_a_reward_model_of_images_is_refused(pairs):
    pairs.preference.beta = default_config().preference.beta
    with pytest.raises(ValueError, match="reward models of images are not supported"):
        reward_model.train(resolve(pairs))


def test_images_without_the_key_are_refused(config):
    config.data.images = False
    with pytest.raises(ValueError, match=r"data\.images"):
        sft.train(resolve(config))


def test_a_model_without_a_tower_is_refused(config, tiny_model):
    config.model.path = str(tiny_model)
    with pytest.raises(ValueError, match="image"):
        sft.train(resolve(config))
