"""A run whose objective has parts: ECHO on an environment and cross-entropy on demonstrations."""

import json

import pytest

from jaxrl.config.resolve import resolve
from jaxrl.train import train
from tests.trainer.test_train import assert_same_weights, metrics


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
