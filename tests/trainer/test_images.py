"""Tests of whole RL runs on prompts with images: the engine's logprobs, and what is refused."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from jaxrl.config import resolve
from jaxrl.models.files.hf_load import model_config
from jaxrl.models.vision.towers import known_tower
from jaxrl.train import train
from jaxrl.trainer.setup.host import check_image_rollouts
from scripts.make_tiny_vlm import write_tiny_vlm
from tests.trainer.test_train import assert_same_weights


def values(run_dir, name):
    lines = map(json.loads, (Path(run_dir) / "metrics.jsonl").read_text().splitlines())
    return [line[name] for line in lines if name in line]


@pytest.mark.thorough
@pytest.mark.parametrize("change", ["sync", "partial", "ppo"])
def test_the_trainer_computes_the_logprobs_of_the_engine(image_config, change):
    if change == "partial":
        image_config.schedule.mode = "partial"
    if change == "ppo":
        image_config.algorithm.advantage, image_config.critic.shared = "gae", True
    assert train(resolve(image_config))
    gaps = values(image_config.run_dir, "mismatch/logp_diff_max")
    assert len(gaps) == 2 and max(gaps) < 1e-4
    assert len(values(image_config.run_dir, "val/reward")) == 2
    lines = (Path(image_config.run_dir) / "samples.jsonl").read_text().splitlines()
    named = {name for line in map(json.loads, lines) for name in line["images"]}
    assert named == {
        f"images/{file.name}" for file in Path(image_config.run_dir, "images").iterdir()
    }
    assert len(named) == 8  # four colours in two sizes


@pytest.mark.thorough
@pytest.mark.bitwise
@pytest.mark.parametrize("mode", ["partial", "async"])
def test_rollouts_with_images_resume_bitwise(image_config, tmp_path, mode):
    image_config.schedule.mode = mode
    image_config.schedule.rollout_devices = int(mode == "async")
    image_config.data.max_response_len = 16
    image_config.data.prompts_per_step = image_config.rollout.n = 2
    image_config.rollout.steps_per_dispatch, image_config.rollout.max_num_seqs = 2, 4
    image_config.rollout.sampling.stop = tuple("aeiou012 .,")  # lengths that differ

    def run(name, n_steps):
        image_config.run_dir, image_config.total_steps = str(tmp_path / name), n_steps
        assert train(resolve(image_config))
        return image_config.run_dir

    whole = run("whole", 3)
    run("resumed", 2)
    assert_same_weights(whole, run("resumed", 3))
    for name in ("reward/mean", "loss/policy", "mismatch/logp_diff_max"):
        assert values(whole, name) == values(tmp_path / "resumed", name)
    assert values(whole, "mismatch/logp_diff_max")[0] < 1e-4  # of the first weights


@pytest.mark.thorough
@pytest.mark.parametrize(("kl", "kl_in"), [("k1", "reward"), ("full", "loss")])
def test_a_teacher_of_the_same_tower_reads_the_images(image_config, vlm, tmp_path, kl, kl_in):
    image_config.algorithm.teacher = str(shutil.copytree(vlm, tmp_path / "teacher"))
    image_config.algorithm.kl, image_config.algorithm.kl_in = kl, kl_in
    image_config.algorithm.kl_coef, image_config.algorithm.advantage = 0.5, "distill"
    assert train(resolve(image_config))
    first, _ = values(image_config.run_dir, f"{kl_in}/kl")
    assert abs(first) < 1e-6  # it has the weights of the policy before the first step


@pytest.mark.parametrize("key", ["teacher", "critic"])
def test_a_model_of_another_tower_is_refused(image_config, tmp_path, key):
    write_tiny_vlm(tmp_path / "other", width=32, n_layers=1, seed=1)
    if key == "teacher":
        image_config.algorithm.teacher, image_config.algorithm.kl_coef = (
            str(tmp_path / "other"),
            0.5,
        )
    else:
        image_config.critic.path = str(tmp_path / "other")
        image_config.algorithm.advantage = "gae"
    with pytest.raises(ValueError, match="has not the vision tower of the policy"):
        train(resolve(image_config))


@pytest.mark.parametrize(
    ("n_workers", "trained", "words"), [(1, False, "rollout workers"), (0, True, "a trained tower")]
)
def test_rollouts_that_read_no_images_are_refused(image_config, vlm, n_workers, trained, words):
    image_config.schedule.mode, image_config.schedule.rollout_workers = "async", n_workers
    image_config.schedule.rollout_devices = 0 if n_workers else 1
    decoder = dataclasses.replace(model_config(vlm), tower=known_tower(vlm) if trained else None)
    with pytest.raises(ValueError, match=words):
        check_image_rollouts(resolve(image_config), decoder)
