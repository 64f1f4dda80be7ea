"""GRPO of Gemma 4 E4B, all weights, on GSM8K, on one host of TPU v5e.

    python -m jaxrl.train --config=configs/grpo_gemma_4_e4b.py

Hardware: TPU v5e 2x4 (8 chips of 16 GB, a free slice of Kaggle).

Data: parquet in verl's schema, written by scripts/prepare_gsm8k.py.

Mesh: fsdp 4 x tensor 2. Layers are stacked (model.layers).

Memory: the optimizer state, the reference and, in rollouts, the policy are in host memory, and KV
pages are freed during updates (rollout.release_kv).

Minutes and result: not measured yet. By the planner's formulas an update needs 10.3 of the 13.4 GiB
that rollout.memory_utilization allows, and a step takes 131 s or more. The reshard of the weights
to the rollout's layout is compiled: 0.8 GiB of temporaries for 7.0 GiB of weights.
"""

from ml_collections import ConfigDict

from jaxrl.config.bases.math_grpo import gsm8k_grpo


def get_config() -> ConfigDict:
    config = gsm8k_grpo()
    config.name = "grpo_gemma_4_e4b"
    config.model.path = "google/gemma-4-E4B-it"
    config.model.layers = "stacked"
    config.mesh.fsdp = 8
    config.rollout.tensor = 2
    config.rollout.release_kv = True
    config.learner.offload = ("optimizer", "reference", "policy")
    config.learner.token_budget = 2048
    config.learner.remat = "mlp"
    return config
