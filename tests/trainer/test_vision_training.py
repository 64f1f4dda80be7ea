"""Tests of whole runs that train the vision tower: what changes, exports, layouts and resume."""

import json
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from jaxrl import sft
from jaxrl.config.arguments.convert import read
from jaxrl.config.resolve import default_config, resolve
from jaxrl.convert import convert
from jaxrl.models.files.adapter import PREFIX, WEIGHTS
from jaxrl.models.files.quantized.tensors import read_tensor
from jaxrl.models.files.safetensors import read_header
from jaxrl.models.files.weight_files import named_infos
from jaxrl.models.vision.names import is_of_tower
from jaxrl.train import train
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


@pytest.mark.thorough
def test_grpo_samples_and_trains_with_the_current_tower(config, vlm):
    """The engine's logprobs are those of the trainer at every step, after the tower has changed."""
    config.algorithm.kl_coef, config.algorithm.kl_in = 0.1, "loss"
    config.learner.lr, config.learner.mini_batch_prompts = 1e-2, 2
    config.total_steps = 3
    assert train(resolve(config))
    gaps = values(config.run_dir, "mismatch/logp_diff_max")
    assert len(gaps) == 3 and max(gaps) < 1e-4
    of_tower, others = changed(vlm, Path(config.run_dir) / "hf")
    assert others and of_tower == {n for n in tensors(vlm) if is_of_tower(n)}
    kl = values(config.run_dir, "loss/kl")
    assert kl[0] < kl[-1]  # the reference keeps its tower and its weights


@pytest.mark.thorough
def test_adapters_of_the_tower_are_merged_and_written_in_pefts_format(config, vlm):
    config.lora.rank, config.lora.target_modules = 2, ("q_proj", VISION)
    config.algorithm.kl_coef = 0.1
    config.learner.lr = 1e-2
    assert train(resolve(config))
    run = Path(config.run_dir)
    of_tower, others = changed(vlm, run / "hf")
    linear = {n for n in tensors(vlm) if is_of_tower(n) and ("attn" in n or "fc" in n)}
    assert of_tower == {n for n in linear if n.endswith(".weight")}
    assert others and all("q_proj" in name for name in others)
    export_checkpoint(run, "last", run / "again")
    assert changed(run / "hf", run / "again") == (set(), set())
    stored = json.loads((run / "adapter" / "adapter_config.json").read_text())
    names = {info.partition(".lora_")[0] for info in read_header(run / "adapter" / WEIGHTS)}
    short = {name.removeprefix(PREFIX) for name in names}
    assert all(re.fullmatch(stored["target_modules"], name) for name in short)
    assert {f"{name}.weight" for name in short} == of_tower | others


@pytest.mark.thorough
def test_a_run_starts_from_the_adapters_of_a_tower_and_they_are_merged(config, vlm, tmp_path):
    """Those of a run that was trained: as its export, in the next run and by jaxrl.convert."""
    config.lora.rank, config.lora.target_modules = 2, ("q_proj", VISION)
    config.learner.lr, config.total_steps = 1e-2, 1
    assert train(resolve(config))
    first = Path(config.run_dir)
    arguments = [str(vlm), str(tmp_path / "merged"), f"--adapter={first / 'adapter'}"]
    convert(read(arguments))
    assert changed(first / "hf", tmp_path / "merged") == (set(), set())
    config.lora.path, config.run_dir = str(first / "adapter"), str(tmp_path / "second")
    config.learner.lr = 0.0
    assert train(resolve(config))
    assert changed(first / "hf", tmp_path / "second" / "hf") == (set(), set())
    config.model.freeze_vision, config.lora.target_modules = "all", ("q_proj",)
    config.run_dir = str(tmp_path / "third")
    with pytest.raises(ValueError, match=r"frozen here .*config\.model\.freeze_vision='none'"):
        train(resolve(config))


@pytest.mark.thorough
def test_rows_and_meshes_give_the_same_steps(supervised):
    layouts = [(256, {}), (128, {}), (128, {"fsdp": 2})]
    losses = [losses_with(supervised, *layout) for layout in layouts]
    np.testing.assert_allclose(losses[1:], losses[:1] * 2, rtol=1e-4)


@pytest.mark.slow
def test_a_pipeline_gives_the_steps_of_one_device(supervised):
    supervised.learner.remat = "full"
    want = losses_with(supervised, 256, {})
    supervised.learner.pipeline_schedule = "1f1b"
    np.testing.assert_allclose(losses_with(supervised, 256, {"stage": 2}), want, rtol=1e-4)


def losses_with(config, budget, sizes):
    """Losses and norms of a run with this token budget and mesh."""
    config.run_dir += "x"
    config.learner.token_budget = budget
    config.mesh.update(sizes)
    assert sft.train(resolve(config))
    names = ("loss/nll", "optim/vision_grad_norm", "val/nll")
    return [x for name in names for x in values(config.run_dir, name)]


@pytest.mark.thorough
def test_a_resumed_run_continues_with_the_tower_of_its_checkpoint(config, tmp_path):
    config.total_steps = 3
    config.algorithm.kl_coef = 0.1
    assert train(resolve(config))
    want = Path(config.run_dir)
    config.run_dir = str(tmp_path / "resumed")
    config.total_steps, config.checkpoint.every = 2, 1
    assert train(resolve(config))
    config.total_steps = 3
    assert train(resolve(config))
    assert changed(want / "hf", Path(config.run_dir) / "hf") == (set(), set())


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"data.images": False}, "trains on images, and data.images=False"),
        ({"schedule.mode": "partial"}, "schedule.mode='partial': its unfinished responses"),
        ({"algorithm.kl_coef": 0.1, "algorithm.kl": "full"}, "would run a second tower"),
        ({"algorithm.advantage": "gae"}, "critic.shared=False: a separate critic has no tower"),
        ({"learner.offload": ("policy",)}, "leave out 'policy'"),
        ({"learner.lr_layer_decay": 0.9}, "the blocks of a tower are no layers of it"),
    ],
    ids=str,
)
def test_what_is_not_supported_is_refused_by_name(keys, words):
    config = default_config()
    changes = {"model.path": "model", "data.train": ("rows.parquet",), "data.images": True}
    config.update_from_flattened_dict(changes | {"model.freeze_vision": "none"} | keys)
    with pytest.raises(ValueError, match=re.escape(words)):
        resolve(config)
