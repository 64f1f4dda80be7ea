"""Runs of models with states: gated DeltaNet next to attention."""

import dataclasses

import numpy as np
import pytest

from jaxrl.config.resolve import resolve
from jaxrl.models.config import uniform_decoder
from jaxrl.models.rope_config import Rope
from jaxrl.models.state_mixers import GatedDeltaNetConfig
from jaxrl.train import train
from tests.trainer.conftest import write_model
from tests.trainer.test_train import metrics

SIZES = dict(L=2, D=32, N=4, K=2, H=8, F=64, V=260, tied=True, max_len=256)


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Folders of a model of gated DeltaNet and attention, and of one with attention only."""
    dense = uniform_decoder(
        "qwen3_5", **SIZES, unit_offset=True, qk_norm=True, rope=Rope(rotary=0.5)
    )
    attention = dataclasses.replace(
        dense.layers[0], mixer=dataclasses.replace(dense.layers[0].mixer, gate=True)
    )
    delta = dataclasses.replace(attention, mixer=GatedDeltaNetConfig(K=2, N=4, D=8, V=8))
    layers = {"hybrid": (delta, attention), "attention": (attention, attention)}
    folder = tmp_path_factory.mktemp("states")
    return {
        name: write_model(folder / name, dataclasses.replace(dense, layers=own))
        for name, own in layers.items()
    }


def rewards_of(config, name, models, tmp_path):
    config.model.path, config.run_dir = str(models[name]), str(tmp_path / name)
    assert train(resolve(config))
    lines = metrics(config.run_dir)
    assert max(line.get("mismatch/logp_diff_max", 0.0) for line in lines) < 1e-4
    return [line["reward/mean"] for line in lines if "reward/mean" in line]


@pytest.mark.thorough
def test_a_run_of_a_hybrid_model_trains_saves_and_exports(tiny_config, models, tmp_path):
    tiny_config.total_steps = 2
    rewards = rewards_of(tiny_config, "hybrid", models, tmp_path)
    assert len(rewards) == 2 and (tmp_path / "hybrid" / "hf" / "config.json").exists()


@pytest.mark.slow
def test_a_hybrid_model_learns_as_its_twin_with_attention(tiny_config, models, tmp_path):
    tiny_config.total_steps = 60
    tiny_config.learner.lr = 3e-3
    tiny_config.rollout.n = 8
    tiny_config.rollout.max_num_seqs = 32
    tiny_config.data.val = ()
    for name in models:
        rewards = rewards_of(tiny_config, name, models, tmp_path)
        print(name, np.round(rewards, 3))
        assert np.mean(rewards[-5:]) > 1.3 * np.mean(rewards[:5])
