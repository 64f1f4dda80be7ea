"""Tests of whole RL runs on prompts with images: the engine's logprobs, and what is refused."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from jaxrl.config import resolve
from jaxrl.train import train
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
    """Questions about squares of a colour, some with two of them."""
    rows = [
        {
            "question": "<image>" * n + "?",
            "answer": name,
            "images": [{"bytes": encoded(Image.new("RGB", (16 + 8 * i, 16), c))} for i in range(n)],
        }
        for name, c in COLOURS.items()
        for n in (1, 2)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    tiny_config.model.path = str(vlm)
    tiny_config.data.train = tiny_config.data.val = (str(tmp_path / "rows.parquet"),)
    tiny_config.data.chat_template = ""
    tiny_config.data.images = True
    tiny_config.data.max_prompt_len = 64
    tiny_config.total_steps = 2
    return tiny_config


def values(run_dir, name):
    lines = map(json.loads, (Path(run_dir) / "metrics.jsonl").read_text().splitlines())
    return [line[name] for line in lines if name in line]


@pytest.mark.thorough
@pytest.mark.parametrize("change", ["sync", "partial", "ppo"])
def test_the_trainer_computes_the_logprobs_of_the_engine(config, change):
    if change == "partial":
        config.schedule.mode = "partial"
    if change == "ppo":
        config.algorithm.advantage, config.critic.shared = "gae", True
    assert train(resolve(config))
    gaps = values(config.run_dir, "mismatch/logp_diff_max")
    assert len(gaps) == 2 and max(gaps) < 1e-4
    assert len(values(config.run_dir, "val/reward")) == 2
    lines = (Path(config.run_dir) / "samples.jsonl").read_text().splitlines()
    named = {name for line in map(json.loads, lines) for name in line["images"]}
    assert named == {f"images/{file.name}" for file in Path(config.run_dir, "images").iterdir()}
    assert len(named) == 8  # four colours in two sizes


@pytest.mark.parametrize(
    ("section", "key", "value", "words"),
    [
        ("env", "name", "calculator", "environments and agents"),
        ("schedule", "mode", "async", "schedule.mode='async'"),
    ],
)
def test_runs_that_cannot_sample_with_images_are_refused(config, section, key, value, words):
    config[section][key] = value
    if section == "env":
        config.reward.functions = ("environment",)
    with pytest.raises(ValueError, match=words):
        train(resolve(config))
