"""A run of a GLM-4.5: a dense layer, then experts with a router of sigmoids and its correction."""

import pytest
from safetensors.numpy import load_file

from jaxrl.config.resolve import resolve
from jaxrl.models.files.hf_config import config_from_hf
from jaxrl.train import train
from tests.trainer.conftest import write_model
from tests.trainer.test_train import assert_same_weights, metrics, weights

CONFIG = dict(
    model_type="glm4_moe",
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=260,
    max_position_embeddings=256,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    first_k_dense_replace=1,
    use_qk_norm=True,
    tie_word_embeddings=True,
)
CORRECTION = "model.layers.1.mlp.gate.e_score_correction_bias"


@pytest.mark.thorough
def test_a_run_with_a_moving_correction_resumes_bitwise(tiny_config, tmp_path):
    (tmp_path / "model").mkdir()
    folder = write_model(tmp_path / "model", config_from_hf(CONFIG))
    tiny_config.model.path, tiny_config.learner.router_bias_rate = str(folder), 0.01
    tiny_config.run_dir, tiny_config.total_steps = str(tmp_path / "whole"), 4
    assert train(resolve(tiny_config))
    lines = metrics(tiny_config.run_dir)
    assert max(line.get("mismatch/logp_diff_max", 0.0) for line in lines) < 1e-4
    tiny_config.run_dir = str(tmp_path / "resumed")
    for tiny_config.total_steps in (2, 4):
        assert train(resolve(tiny_config))
    assert_same_weights(str(tmp_path / "whole"), tiny_config.run_dir)
    before, after = load_file(folder / "model.safetensors"), weights(tiny_config.run_dir)
    assert (before[CORRECTION] != after[CORRECTION]).any()
