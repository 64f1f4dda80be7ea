"""Tests of whole RL runs on prompts with images: the engine's logprobs, and what is refused."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxrl.config import resolve
from jaxrl.models.files.atomic_folder import write_json
from jaxrl.train import train
from scripts.make_tiny_vlm import PROCESSOR, write_tiny_vlm
from tests.models.vision.tiny_gemma import write_tiny_gemma
from tests.trainer.schedule.local_workers import use_local_workers
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
@pytest.mark.parametrize("where", ["partial", "async", "workers"])
def test_rollouts_with_images_resume_bitwise(flight_config, tmp_path, monkeypatch, where):
    use(flight_config, where, monkeypatch)

    def run(name, n_steps):
        flight_config.run_dir, flight_config.total_steps = str(tmp_path / name), n_steps
        assert train(resolve(flight_config))
        return flight_config.run_dir

    whole = run("whole", 3)
    assert cut_lengths(run("resumed", 2)) or where != "partial", "no response is continued"
    assert_same_weights(whole, run("resumed", 3))
    for name in ("reward/mean", "loss/policy", "mismatch/logp_diff_max"):
        assert values(whole, name) == values(tmp_path / "resumed", name)
    assert values(whole, "mismatch/logp_diff_max")[0] < 1e-4  # of the first weights


@pytest.mark.thorough
@pytest.mark.parametrize("freeze", ["all", "none"])
def test_gemma_samples_and_trains_on_images_whose_tokens_see_each_other(
    image_config, tmp_path, freeze
):
    image_config.model.path = str(write_tiny_gemma(tmp_path / "gemma"))
    image_config.model.freeze_vision = freeze
    assert train(resolve(image_config))
    gaps = values(image_config.run_dir, "mismatch/logp_diff_max")
    assert len(gaps) == 2 and max(gaps) < 1e-4


@pytest.mark.thorough
def test_rollout_workers_give_the_responses_of_an_engine_in_the_run(
    flight_config, tmp_path, monkeypatch
):
    found = []
    for where in ("async", "workers"):
        flight_config.run_dir, flight_config.total_steps = str(tmp_path / where), 3
        use(flight_config, where, monkeypatch)
        assert train(resolve(flight_config))
        found.append((tmp_path / where / "samples.jsonl").read_text())
    engine, workers = found
    assert workers == engine
    assert_same_weights(tmp_path / "async", tmp_path / "workers")
    assert values(tmp_path / "workers", "workers/ready") == [2, 2, 2]
    assert values(tmp_path / "workers", "mismatch/logp_diff_max")[0] < 1e-4


@pytest.fixture
def flight_config(image_config):
    """Responses of several dispatches, whose lengths differ."""
    image_config.data.max_response_len = 16
    image_config.data.prompts_per_step = image_config.rollout.n = 2
    image_config.rollout.steps_per_dispatch, image_config.rollout.max_num_seqs = 2, 4
    image_config.rollout.sampling.stop = tuple("aeiou012 .,")
    return image_config


def use(config, where, monkeypatch):
    """Sets a schedule with staleness, and where it generates."""
    config.schedule.mode = "partial" if where == "partial" else "async"
    config.schedule.rollout_devices = int(where == "async")
    config.schedule.rollout_workers = 2 * int(where == "workers")
    if where == "workers":
        use_local_workers(monkeypatch.setattr)


def cut_lengths(run_dir):
    """Tokens of the responses that the last checkpoint has in part."""
    last = max((Path(run_dir) / "checkpoints").iterdir(), key=lambda folder: int(folder.name))
    saved = json.loads((last / "host" / "metadata").read_text())["in_flight"]
    groups = [group for one in saved.get("processes", [saved]) for group in one["groups"]]
    return [
        n
        for group in groups
        for n, finish in zip(group["lengths"], group["finish"], strict=True)
        if n and not finish
    ]


@pytest.mark.thorough
@pytest.mark.parametrize(("kl", "kl_in"), [("k1", "reward"), ("full", "loss")])
def test_a_teacher_of_the_same_tower_reads_the_images(image_config, vlm, tmp_path, kl, kl_in):
    image_config.algorithm.teacher = str(shutil.copytree(vlm, tmp_path / "teacher"))
    image_config.algorithm.kl, image_config.algorithm.kl_in = kl, kl_in
    image_config.algorithm.kl_coef, image_config.algorithm.advantage = 0.5, "distill"
    assert train(resolve(image_config))
    first, _ = values(image_config.run_dir, f"{kl_in}/kl")
    assert abs(first) < 1e-6  # it has the weights of the policy before the first step


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "key"),
    [("equal", "teacher"), ("wider", "teacher"), ("equal", "more"), ("wider", "more")],
)
def test_a_teacher_of_another_tower_reads_its_own_features(image_config, vlm, tmp_path, kind, key):
    """Also as one of several teachers; then it has all rows, and the first one has none."""
    teacher = tmp_path / "teacher"
    if kind == "equal":  # the same features by another order of the projector's hidden units
        shutil.copytree(vlm, teacher)
        reorder(teacher / "model.safetensors")
    else:
        write_tiny_vlm(teacher, width=64, n_layers=1, seed=1)
    image_config.algorithm.teacher, image_config.algorithm.kl = str(teacher), "k1"
    if key == "more":
        image_config.algorithm.more_teachers = (f"{teacher}?source=default",)
        other = tmp_path / "other"
        write_tiny_vlm(other, width=32, n_layers=1, seed=2)
        image_config.algorithm.teacher = str(other)
        image_config.learner.offload = ("reference",)
    image_config.algorithm.kl_in, image_config.algorithm.kl_coef = "reward", 0.5
    image_config.algorithm.advantage = "distill"
    assert train(resolve(image_config))
    first, _ = values(image_config.run_dir, "reward/kl")
    assert (abs(first) < 1e-4) if kind == "equal" else (abs(first) > 1e-3)


def reorder(path):
    """Reverses the hidden units of a projector, which changes no feature but by rounding."""
    tensors = load_file(path)
    for name, axis in (("1.weight", 0), ("1.bias", 0), ("2.weight", 1)):
        name = f"model.visual.merger.linear_fc{name}"
        tensors[name] = np.ascontiguousarray(np.flip(tensors[name], axis))
    save_file(tensors, path)


def test_a_critic_of_another_tower_is_refused(image_config, tmp_path):
    write_tiny_vlm(tmp_path / "other", width=32, n_layers=1, seed=1)
    image_config.critic.path = str(tmp_path / "other")
    image_config.algorithm.advantage = "gae"
    with pytest.raises(ValueError, match="has not the vision tower of the policy"):
        train(resolve(image_config))


@pytest.mark.parametrize(
    ("kl", "change", "message"),
    [
        ("k3", dict(image_mean=[0.1, 0.5, 0.5]), r"image_mean=\(0.5, 0.5, 0.5\) and \(0.1"),
        ("full", {}, "the features of one; set algorithm.kl_top_k"),
    ],
)
def test_a_teacher_that_reads_an_image_otherwise_is_refused(
    image_config, tmp_path, kl, change, message
):
    teacher = tmp_path / "teacher"
    write_tiny_vlm(teacher, width=32, n_layers=1, seed=1)
    write_json(teacher / "preprocessor_config.json", PROCESSOR | change)
    image_config.algorithm.teacher, image_config.algorithm.kl_coef = str(teacher), 0.5
    image_config.algorithm.kl, image_config.algorithm.kl_in = kl, "loss"
    with pytest.raises(ValueError, match=message):
        train(resolve(image_config))
