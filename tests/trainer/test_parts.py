"""Runs whose objective has parts: ECHO, demonstrations, and the terms of the responses."""

import json

import pytest

from jaxrl.config.resolve import resolve
from jaxrl.train import train
from tests.trainer.test_train import assert_same_weights, metrics

SOURCE = "addition/1"


@pytest.fixture
def mixed_config(env_config, tmp_path):
    rows = [{"prompt": f"Say {i}.", "response": str(i) * 3} for i in range(7)]
    rows += [{"prompt": "Hi.", "response": "ok", "data_source": "chat"}] * 3
    path = tmp_path / "demonstrations.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    env_config.data.demonstrations, env_config.data.demonstrations_per_step = (str(path),), 4
    env_config.algorithm.parts = (
        "observations?weight=0.1&aggregation=seq_mean_token_mean",
        "demonstrations?weight=0.5&final_weight=0.1&ramp=4",
        "demonstrations?weight=0.2&source=chat",
    )
    env_config.learner.mini_batch_prompts = env_config.data.prompts_per_step // 2
    return env_config


@pytest.mark.thorough
def test_a_run_trains_all_parts_and_resumes_bitwise(mixed_config, tmp_path):
    assert train(resolve(mixed_config))
    uninterrupted = mixed_config.run_dir
    lines = [line for line in metrics(uninterrupted) if "optim/grad_norm" in line]
    assert len(lines) == 2
    for step, line in enumerate(lines):
        assert line["mismatch/logp_diff_max"] < 1e-4
        # an untrained model predicts bytes about uniformly
        assert line["loss/observations"] == pytest.approx(5.5, abs=1)
        assert line["loss/observations_tokens"] > 0
        assert line["loss/demonstrations_weight"] == pytest.approx(0.5 - 0.1 * step)
        assert line["loss/demonstrations/chat_weight"] == 0.2
        # 3 or 2 characters and the end of the turn
        n = line["loss/demonstrations_tokens"] / 4 + line["loss/demonstrations/chat_tokens"] / 3
        assert n == 4
    mixed_config.run_dir = str(tmp_path / "resumed")
    mixed_config.total_steps = 1
    assert train(resolve(mixed_config))
    mixed_config.total_steps = 2
    assert train(resolve(mixed_config))
    assert_same_weights(uninterrupted, mixed_config.run_dir)


@pytest.mark.thorough
def test_the_loss_of_a_run_is_the_weighted_sum_of_its_parts(env_config):
    env_config.algorithm.parts = (
        "policy",
        "kl?weight=0.5",
        "entropy?weight=0.01",
        "observations?weight=0.1",
    )
    env_config.algorithm.source_parts = (f"{SOURCE}?parts=policy,kl,entropy,observations",)
    assert train(resolve(env_config))
    for line in [line for line in metrics(env_config.run_dir) if "optim/grad_norm" in line]:
        total = line["loss/policy"] + 0.5 * line["loss/kl"] - 0.01 * line["loss/entropy"]
        assert line["loss/total"] == pytest.approx(
            total + 0.1 * line["loss/observations"], rel=1e-4
        )
        assert line["loss/entropy"] == pytest.approx(5.5, abs=1)
        assert line["loss/kl_tokens"] == line["loss/policy_tokens"] > 0
