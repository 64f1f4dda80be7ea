"""GRPO of Gemma 4 31B with adapters over a 4-bit base, on GSM8K, on one host of TPU v5e.

    python -m jaxrl.train --config=configs/grpo_gemma_4_31b_lora.py

Hardware: TPU v5e 2x4 (8 chips of 16 GB, a free slice of Kaggle).

Data: parquet in verl's schema, written by scripts/prepare_gsm8k.py.

Mesh: fsdp 2 x tensor 4. Layers are stacked (model.layers). Adapters of rank 32 are on all linear
layers.

Minutes and result: not measured yet. Compiled, the rollout needs 11.7 GiB without KV pages and the
update 5.6 of the 13.4 GiB that rollout.memory_utilization allows: it fits, but it is too slow to
use. A call of decode moves 169 GiB of HBM per device, probably because the 4-bit base is expanded
there, and its 3.7 GiB of temporaries leave 127 KV pages. A step takes 23,800 s or more, where the
formulas say 702 s (docs/plans/grpo_gemma_4_31b_lora.v5e-2x4.txt).
"""

from ml_collections import ConfigDict

from jaxrl.config.bases.math_grpo import gsm8k_grpo


def get_config() -> ConfigDict:
    config = gsm8k_grpo()
    config.name = "grpo_gemma_4_31b_lora"
    config.model.path = "google/gemma-4-31B-it"
    config.model.layers = "stacked"
    config.lora.rank = 32
    config.lora.base_dtype = "nf4"
    config.learner.lr = 1e-5
    config.mesh.fsdp = 2
    config.mesh.tensor = 4
    config.rollout.release_kv = True
    config.learner.token_budget = 2048
    return config
