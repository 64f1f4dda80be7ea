"""Tests of jaxrl/trainer/offline/ratings.py and of classifiers of several labels in
jaxrl/learner/reward_model.py: reward models trained on ratings, and used with weights of labels."""

import random
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file, save_file

from jaxrl import reward_model
from jaxrl.config.resolve import resolve
from jaxrl.learner.reward_model import open_reward_model, weighted_score
from jaxrl.models.files.hf_load import classifier_config
from jaxrl.trainer.export import export_checkpoint
from jaxrl.trainer.offline.ratings import make_samples
from jaxrl.types import Reward
from sharding import make_mesh
from tests.trainer.test_reward_models import (
    assert_close,
    assert_gradient,
    assert_layouts_train_alike,
    at_moved_weights,
    metrics,
    rollout,
    score_at_end,
    tiny_scorer,
    weights,
    with_rows,
)

__all__ = ["tiny_scorer"]

ATTRIBUTES = ("early", "long")


def rated(n, seed):
    """Answers rated by whether their letters are from a to h, and by their length; some are not."""
    draw, rows = random.Random(seed), []
    for i in range(n):
        early, size = draw.random() < 0.5, draw.randint(2, 8)
        text = "".join(draw.choices("abcdefgh" if early else "stuvwxyz", k=size))
        ratings: dict[str, float | None] = {"early": 2.0 * early, "long": size / 4}
        if i % 3 == 1:
            del ratings["early"]
        if i % 3 == 2:
            ratings["long"] = None
        rows.append({"prompt": f"{draw.randint(0, 99)}?", "response": text} | ratings)
    return rows


@pytest.fixture
def rating_config(tiny_config, tmp_path):
    """40 steps of 12 answers."""
    tiny_config.reward_model.objective = "attributes"
    tiny_config.reward_model.attributes = ATTRIBUTES
    return with_rows(tiny_config, tmp_path, rated, steps=40, per_step=12)


@pytest.mark.thorough
def test_a_model_of_two_attributes_learns_and_is_exported_with_their_names(rating_config, tmp_path):
    assert reward_model.train(resolve(rating_config))
    lines = metrics(rating_config.run_dir)
    first, last = [line for line in lines if "val/loss" in line]
    assert last["val/loss"] < 0.5 * first["val/loss"]
    assert last["val/loss_early"] < 0.5 * first["val/loss_early"]
    assert {"val/loss_early", "val/loss_long"} <= last.keys()

    folder = Path(rating_config.run_dir) / "hf"
    assert classifier_config(folder).labels == ATTRIBUTES
    config = transformers.AutoConfig.from_pretrained(folder)
    assert config.architectures == ["LlamaForSequenceClassification"]
    assert config.num_labels == 2 and config.id2label == {0: "early", 1: "long"}
    assert weights(rating_config.run_dir)["score.weight"].shape == (2, 32)

    export_checkpoint(Path(rating_config.run_dir), "last", tmp_path / "exported")
    assert classifier_config(tmp_path / "exported").labels == ATTRIBUTES
    assert_close(load_file(tmp_path / "exported" / "model.safetensors"), weights_of(folder))


def weights_of(folder):
    return load_file(folder / "model.safetensors")


@pytest.mark.thorough
def test_the_gradient_equals_that_of_the_mean_over_all_given_ratings(rating_config):
    """Packed samples through the value loss, against a mean over the ratings of whole answers."""
    with at_moved_weights(rating_config, rated(4, 2)) as (run, items, moved):
        samples, found = make_samples(run, items)
        ratings = jnp.stack([item.ratings for item in items])
        given = ~jnp.isnan(ratings)
        assert int(given.sum()) == 6

        def direct(params):
            scores = []
            for item in items:
                d = item.completion
                tokens = jnp.concatenate([d.prompt_tokens, d.tokens])[None]
                scores.append(score_at_end(params, tokens))
            errors = jnp.where(given, jnp.stack(scores) - jnp.nan_to_num(ratings), 0.0)
            return jnp.square(errors).sum() / given.sum()

        loss = assert_gradient(run, samples, moved, direct)
        assert found["ratings/loss"] == pytest.approx(loss, rel=1e-5)


@pytest.mark.thorough
def test_packing_and_mesh_do_not_change_the_weights_trained_on_ratings(rating_config, tmp_path):
    assert_layouts_train_alike(rating_config, tmp_path)


@pytest.mark.thorough
def test_adapters_are_exported_with_a_head_of_all_attributes(rating_config, tmp_path):
    rating_config.lora.rank, rating_config.lora.alpha = 4, 8.0
    rating_config.total_steps, rating_config.data.val = 2, ()
    assert reward_model.train(resolve(rating_config))
    folder = Path(rating_config.run_dir)
    adapter = load_file(folder / "adapter" / "adapter_model.safetensors")
    assert adapter["base_model.model.score.weight"].shape == (2, 32)
    assert classifier_config(folder / "hf").labels == ATTRIBUTES
    export_checkpoint(folder, "last", tmp_path / "exported")
    assert classifier_config(tmp_path / "exported").labels == ATTRIBUTES
    assert_close(weights_of(tmp_path / "exported"), weights(folder))


@pytest.fixture(scope="session")
def two_labels(tiny_scorer, tmp_path_factory):
    """The tiny classifier with a second label, whose score is -2 times the first."""
    folder = shutil.copytree(tiny_scorer, tmp_path_factory.mktemp("labels") / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["score.weight"] = np.concatenate(
        [tensors["score.weight"], -2 * tensors["score.weight"]]
    )
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.thorough
def test_a_reward_is_the_weighted_sum_of_the_labels(tiny_config, tiny_scorer, two_labels):
    found = {}
    with jax.set_mesh(make_mesh(fsdp=1)):
        for folder, label_weights in ((tiny_scorer, ()), (two_labels, (1.0, 0.25))):
            tiny_config.reward_model.path = str(folder)
            tiny_config.reward_model.label_weights = label_weights
            model = open_reward_model(resolve(tiny_config), folder, jnp.dtype("float32"))
            found[folder] = model.add_scores([rollout("3"), rollout("no")], [Reward(1.0)] * 2)
    for one, two in zip(found[tiny_scorer], found[two_labels], strict=True):
        score = one.parts["reward_model"]
        assert two.parts["reward_model/LABEL_0"] == pytest.approx(score, abs=1e-4)
        assert two.parts["reward_model/LABEL_1"] == pytest.approx(-2 * score, abs=1e-4)
        assert two.parts["reward_model"] == pytest.approx(0.5 * score, abs=1e-4)
        assert two.value == pytest.approx(1 + 0.5 * score, abs=1e-4)


def test_the_score_of_labels_is_their_weighted_sum():
    score = weighted_score(
        np.array([1.0, 2.0, -4.0], np.float32), ("a", "b", "c"), (0.5, 1.0, 0.25)
    )
    assert score.value == pytest.approx(0.5 + 2.0 - 1.0)
    assert score.labels == {"a": 1.0, "b": 2.0, "c": -4.0}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"label_weights": (1.0,)}, r"2 labels .*label_weights=\(1\.0,\) has 1 weights; give one"),
        ({"step_reward": "min"}, "step_reward='min' reads one label at each step"),
    ],
)
def test_weights_that_do_not_fit_the_labels_are_refused(tiny_config, two_labels, changes, message):
    tiny_config.reward_model.update({"path": str(two_labels)} | changes)
    with jax.set_mesh(make_mesh(fsdp=1)), pytest.raises(ValueError, match=message):
        open_reward_model(resolve(tiny_config), two_labels, jnp.dtype("float32"))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"objective": "attributes"}, r"objective='attributes' with reward_model\.attributes=\(\)"),
        ({"attributes": ("a",)}, r"objective='pairs' with reward_model\.attributes=\('a',\)"),
        ({"objective": "attributes", "attributes": ("a", "a")}, "has a name twice"),
        (
            {"path": "m", "step_reward": "min", "label_weights": (1.0, 1.0)},
            "of one label; omit one",
        ),
        ({"label_weights": (1.0,)}, r"reward_model\.path is empty"),
    ],
)
def test_keys_of_attributes_that_do_not_go_together_are_refused(tiny_config, changes, message):
    tiny_config.reward_model.update(changes)
    with pytest.raises(ValueError, match=message):
        resolve(tiny_config)


@pytest.mark.slow  # other models train on these meshes in default and thorough cases
@pytest.mark.parametrize("mesh", [{"sequence": 2}, {"stage": 2}, {"stage": 2, "fsdp": 2}])
def test_labels_are_trained_alike_in_rings_and_pipelines(rating_config, two_layers, tmp_path, mesh):
    config = rating_config
    config.model.path = str(two_layers)
    config.total_steps, config.learner.eps, config.data.val = 2, 1e-4, ()
    assert reward_model.train(resolve(config))
    reference = weights(config.run_dir)
    config.run_dir = str(tmp_path / "mesh")
    config.mesh.update(mesh)
    assert reward_model.train(resolve(config))
    assert_close(weights(config.run_dir), reference)
