"""GRPO of Gemma 4 E4B, all weights, on GSM8K, on one host of TPU v5e.

    python -m jaxrl.train --config=configs/grpo_gemma_4_e4b.py

Hardware: TPU v5e 2x4 (8 chips of 16 GB, a free slice of Kaggle).

Data: parquet in verl's schema, written by scripts/prepare_gsm8k.py.

Mesh: fsdp 8, rollout over tensor 2. Layers are stacked (model.layers).

Memory: the optimizer state, the reference and, in rollouts, the policy are in host memory, and KV
pages are freed during updates (rollout.release_kv).

Minutes and result: not measured yet. The compiled plan (docs/plans/grpo_gemma_4_e4b.v5e-2x4.txt)
needs 13.39 GiB for an update, all that rollout.memory_utilization allows of the chip's 15.75; a
step takes 110 s at peak rates and 210 s calibrated, with 992 concurrent sequences.
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
    config.learner.token_budget = 4096
    config.learner.remat = "full"
    return config
