"""GRPO of Gemma 4 31B with adapters over an int8 base, on GSM8K, on one host of TPU v5e.

    python -m jaxrl.train --config=configs/grpo_gemma_4_31b_lora.py

Hardware: TPU v5e 2x4 (8 chips of 16 GB, a free slice of Kaggle).

Data: parquet in verl's schema, written by scripts/prepare_gsm8k.py.

Mesh: fsdp 2 x tensor 4. Layers are stacked (model.layers). Adapters of rank 32 are on all linear
layers.

Memory: the optimizer state and, in rollouts, the policy are in host memory, and KV pages are freed
during updates (rollout.release_kv).

Minutes and result: not measured yet. By its plan (docs/plans/grpo_gemma_4_31b_lora.v5e-2x4.txt) an
update needs 6.0 GiB and the rollout 11.7 without KV pages of the 13.4 GiB that
rollout.memory_utilization allows. A step takes 3,159 s or more, 2,823 s of it in the rollout of 34
sequences at a time. A base in nf4 (lora.base_dtype) has half the bytes, but a TPU moves 20 bytes
per weight to dequantize it: its compiled step takes 23,800 s (docs/LOG.md).
"""

from ml_collections import ConfigDict

from jaxrl.config.bases.math_grpo import gsm8k_grpo


def get_config() -> ConfigDict:
    config = gsm8k_grpo()
    config.name = "grpo_gemma_4_31b_lora"
    config.model.path = "google/gemma-4-31B-it"
    config.model.layers = "stacked"
    config.lora.rank = 32
    config.lora.base_dtype = "int8"
    config.learner.lr = 1e-5
    config.mesh.fsdp = 2
    config.mesh.tensor = 4
    config.rollout.release_kv = True
    config.learner.offload = ("optimizer", "policy")
    config.learner.token_budget = 2048
    return config
