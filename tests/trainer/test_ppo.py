"""Tests of PPO with a critic: GAE returns of random episodes (jaxrl/trainer/phases/advantage.py),
tiny runs (jaxrl/trainer/phases/experience.py, update.py), resuming, and rejected configs."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxrl.config import resolve
from jaxrl.config.command_line import parse
from jaxrl.config.keys import AlgorithmConfig
from jaxrl.models.files.hf_load import load_model
from jaxrl.train import train
from jaxrl.trainer.loop import exit_status
from jaxrl.trainer.phases.advantage import add_advantages
from jaxrl.trainer.phases.mini_batches import value_metrics
from jaxrl.trainer.rl_step import train_step
from jaxrl.trainer.setup.opening import open_run
from jaxrl.types import TrainingSample
from sharding import make_mesh
from sharding.rules import TRAIN


def episodes(rng, n=6) -> list[TrainingSample]:
    """Responses of 1-9 tokens with random values; every second one has observation tokens."""

    def one(i: int) -> TrainingSample:
        length = int(rng.integers(1, 10))
        mask = rng.random(length) < 0.7
        mask[rng.integers(length)] = True
        return TrainingSample(
            prompt_tokens=np.arange(3, dtype=np.int32),
            tokens=np.zeros(length, np.int32),
            loss_mask=np.ones(length, bool) if i % 2 else mask,
            values=rng.standard_normal(length).astype(np.float32),
        )

    return [one(i) for i in range(n)]


def defined_returns(
    r: TrainingSample, reward: float, penalty: np.ndarray, gamma: float, lam: float
):
    """(positions, advantages, returns) of the loss tokens, from the definition of GAE."""
    at = np.flatnonzero(r.loss_mask)
    rewards = [-penalty[t] for t in at]
    rewards[-1] += reward
    values = [*(r.values[t] for t in at), 0.0]
    n = len(at)
    delta = [rewards[t] + gamma * values[t + 1] - values[t] for t in range(n)]
    a = [sum((gamma * lam) ** (s - t) * delta[s] for s in range(t, n)) for t in range(n)]
    return at, np.array(a), np.array(a) + np.array(values[:-1])


@pytest.mark.parametrize("seed", range(8))
def test_returns_and_advantages_of_random_episodes_follow_the_definition_of_gae(seed):
    rng = np.random.default_rng(seed)
    gamma, lam = (1.0, 1.0) if seed == 0 else rng.uniform(0.3, 1.0, 2)
    rollouts = episodes(rng)
    rewards = rng.standard_normal(len(rollouts))
    penalties = [rng.standard_normal(len(r.tokens)).astype(np.float32) for r in rollouts]
    cfg = AlgorithmConfig(advantage="gae", gamma=gamma, lam=lam)
    got = add_advantages(rollouts, rewards, cfg, penalties=penalties)
    slow = [
        defined_returns(r, reward, p, gamma, lam)
        for r, reward, p in zip(rollouts, rewards, penalties, strict=True)
    ]
    every = np.concatenate([a for _, a, _ in slow])
    for r, (at, advantages, returns) in zip(got, slow, strict=True):
        white = (advantages - every.mean()) / every.std(ddof=1)
        np.testing.assert_allclose(r.advantages[at], white, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(r.returns[at], returns, rtol=1e-4, atol=1e-5)
        others = np.delete(np.arange(len(r.tokens)), at)
        assert not r.advantages[others].any() and not r.returns[others].any()
    returns = np.concatenate([g for *_, g in slow])
    values = np.concatenate([r.values[at] for r, (at, *_) in zip(rollouts, slow, strict=True)])
    explained = 1 - (returns - values).var() / returns.var()
    metrics = value_metrics(got)
    np.testing.assert_allclose(metrics["critic/explained_variance"], explained, rtol=1e-3)
    np.testing.assert_allclose(metrics["critic/return_mean"], returns.mean(), rtol=1e-3, atol=1e-6)


@pytest.fixture
def ppo_config(tiny_config):
    """Two updates per step, a KL penalty in the reward, discounted returns."""
    tiny_config.total_steps, tiny_config.data.val = 3, ()
    tiny_config.algorithm.advantage = "gae"
    tiny_config.algorithm.lam, tiny_config.algorithm.gamma = 0.9, 0.99
    tiny_config.algorithm.kl_coef, tiny_config.algorithm.kl_in = 0.05, "reward"
    tiny_config.algorithm.kl = "k1"
    tiny_config.learner.mini_batch_prompts = 2
    return tiny_config


def lines_of(config) -> list[dict]:
    lines = (Path(config.run_dir) / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if "reward/mean" in line]


def numbers(lines: list[dict]) -> list[dict]:
    """The metrics that do not depend on the clock."""
    clock = ("time", "_per_s", "host_fraction")
    return [{k: v for k, v in line.items() if not any(c in k for c in clock)} for line in lines]


def weights(config, folder: str) -> dict[str, np.ndarray]:
    return load_file(Path(config.run_dir) / folder / "model.safetensors")


def assert_same_weights(a: dict, b: dict):
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


def run_main(config, tmp_path) -> int:
    """Exit status of a run of this config through the command line."""
    path = tmp_path / "ppo.py"
    path.write_text(
        "from jaxrl.config import default_config\n"
        f"VALUES = {config.to_dict()!r}\n"
        "def get_config():\n"
        "    config = default_config()\n"
        "    config.update(VALUES)\n"
        "    return config\n"
    )
    return exit_status(train, parse([f"--config={path}"]))


CRITIC = ("loss", "value_mean", "clip_fraction", "return_mean", "explained_variance")


@pytest.mark.thorough
def test_a_critic_learns_with_the_policy_and_resumes_bitwise(ppo_config, tiny_model, tmp_path):
    ppo_config.critic.lr, ppo_config.critic.warmup_steps = 1e-2, 1
    ppo_config.critic.token_budget, ppo_config.critic.epochs = 512, 2
    assert run_main(ppo_config, tmp_path) == 0
    first, *rest = lines = lines_of(ppo_config)
    for line in lines:
        assert all(f"critic/{name}" in line for name in (*CRITIC, "grad_norm"))
        assert line["critic/lr"] == pytest.approx(1e-2) and line["critic/grad_norm"] > 0
        assert line["time/values_s"] > 0 and line["time/update_critic_s"] > 0
    assert first["perf/n_updates"] == 0 and "loss/policy" not in first  # critic warm-up
    assert [line["perf/n_updates"] for line in rest] == [2, 2]
    assert rest[-1]["critic/loss"] < first["critic/loss"]
    # the value head starts at zero and explains nothing
    assert first["critic/explained_variance"] == 0
    assert rest[-1]["critic/explained_variance"] != 0

    before = load_file(tiny_model / "model.safetensors")
    critic = weights(ppo_config, "hf_critic")
    assert "score.weight" in critic and critic["score.weight"].any()
    assert "score.weight" not in weights(ppo_config, "hf")
    name = "model.layers.0.mlp.up_proj.weight"
    assert (critic[name] != before[name]).any()
    assert (critic[name] != weights(ppo_config, "hf")[name]).any()
    with jax.set_mesh(make_mesh()):
        load_model(Path(ppo_config.run_dir) / "hf_critic", rules=TRAIN, heads=("score",))

    uninterrupted = dataclasses.replace(resolve(ppo_config))
    ppo_config.run_dir = str(tmp_path / "resumed")
    ppo_config.total_steps = 2
    assert train(resolve(ppo_config))
    ppo_config.total_steps = 3
    assert train(resolve(ppo_config))
    assert numbers(lines_of(ppo_config)) == numbers(lines)
    for folder in ("hf", "hf_critic"):
        assert_same_weights(weights(ppo_config, folder), weights(uninterrupted, folder))


@pytest.mark.thorough
def test_critic_warm_up_keeps_the_policy_bitwise(ppo_config):
    ppo_config.critic.warmup_steps = 1
    ppo_config.algorithm.kl_coef = 0.0
    with open_run(resolve(ppo_config)) as run:
        policy, critic = jax.device_get(
            (run.core.state.params, run.core.learner.critic.state.params)
        )
        train_step(run)
        after = jax.device_get((run.core.state.params, run.core.learner.critic.state.params))
        jax.tree.map(np.testing.assert_array_equal, policy, after[0])
        assert (critic.score != after[1].score).any()
        train_step(run)
        last = jax.device_get(run.core.state.params)
        assert (policy.embed != last.embed).any()


@pytest.mark.thorough
def test_a_shared_backbone_trains_and_exports_policy_and_critic(ppo_config):
    ppo_config.total_steps = 2
    ppo_config.critic.shared, ppo_config.critic.loss_coef = True, 0.5
    assert train(resolve(ppo_config))
    lines = lines_of(ppo_config)
    for line in lines:
        assert all(f"critic/{name}" in line for name in CRITIC)
        both = line["loss/policy"] + 0.5 * line["critic/loss"]
        np.testing.assert_allclose(line["loss/total"], both, rtol=1e-4)
        assert line["time/values_s"] > 0 and "time/update_critic_s" not in line
    policy, critic = weights(ppo_config, "hf"), weights(ppo_config, "hf_critic")
    assert critic.pop("score.weight").any()
    assert_same_weights(policy, critic)


@pytest.mark.slow
def test_a_shared_backbone_resumes_bitwise(ppo_config, tmp_path):
    ppo_config.critic.shared = True
    assert train(resolve(ppo_config))
    uninterrupted = resolve(ppo_config)
    ppo_config.run_dir, ppo_config.total_steps = str(tmp_path / "resumed"), 1
    assert train(resolve(ppo_config))
    ppo_config.total_steps = 3
    assert train(resolve(ppo_config))
    for folder in ("hf", "hf_critic"):
        assert_same_weights(weights(ppo_config, folder), weights(uninterrupted, folder))


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [{"tensor": 2}, {"sequence": 2}, {"stage": 2}],
    ids=["tensor", "sequence", "stage"],
)
def test_a_critic_on_another_mesh_equals_the_run_on_one_device(
    ppo_config, two_layers, tmp_path, layout
):
    ppo_config.model.path = str(two_layers)
    ppo_config.model.layers = "stacked" if "stage" in layout else "list"
    ppo_config.learner.eps = 1e-3
    assert train(resolve(ppo_config))
    want = lines_of(ppo_config)
    ppo_config.run_dir = str(tmp_path / "own")
    ppo_config.mesh.fsdp = 4
    ppo_config.critic.mesh.update(layout)
    assert train(resolve(ppo_config))
    for one, other in zip(lines_of(ppo_config), want, strict=True):
        for name in ("reward/mean", "loss/policy", *(f"critic/{n}" for n in CRITIC)):
            np.testing.assert_allclose(one[name], other[name], rtol=1e-3, atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_offloading_does_not_change_a_run_with_a_critic(ppo_config, tmp_path):
    assert train(resolve(ppo_config))
    want = numbers(lines_of(ppo_config))
    for offload in (("reference", "critic"), ("optimizer", "reference")):
        ppo_config.run_dir = str(tmp_path / offload[0])
        ppo_config.learner.offload = offload
        assert train(resolve(ppo_config))
        found = numbers(lines_of(ppo_config))
        # An optimizer by layer rounds differently (tests/learner/optimizers/test_steps.py).
        close = 1e-4 if "optimizer" in offload else 0
        for one, other in zip(found, want, strict=True):
            assert one == pytest.approx(other, rel=close, abs=close)


def test_a_critic_with_another_tokenizer_is_rejected(ppo_config, tiny_model, tmp_path):
    other = tmp_path / "critic"
    shutil.copytree(tiny_model, other)
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace("<|im_start|>", "<|start|>"))
    ppo_config.critic.path = str(other)
    with pytest.raises(ValueError, match=r"critic\.path=.*tokenizer differs.*'<\|im_start\|>'"):
        train(resolve(ppo_config))


@pytest.mark.thorough
def test_a_critic_warm_up_as_long_as_the_run_is_rejected(ppo_config):
    ppo_config.total_steps, ppo_config.critic.warmup_steps = 0, 16  # 64 prompts, 4 a step
    with pytest.raises(ValueError, match="leaves none of the 16 steps to the policy"):
        train(resolve(ppo_config))
