"""GRPO of Qwen2.5-7B-Instruct on GSM8K and MATH, on a TPU v5p-128.

    python -m jaxrl.train --config=configs/grpo_7b.py --config.run_dir=/shared/runs/grpo_7b

Hardware: TPU v5p 4x4x4 (64 chips); configs/grpo_7b_h100.py is the same run on 64 GPUs. The run
folder must be on a shared disk.

Data: parquet in verl's schema. scripts/prepare_gsm8k.py writes GSM8K; MATH needs the same columns
and data_source "lighteval/MATH". The reward function is chosen by data_source.

Mesh: fsdp 16 x tensor 4; 4 kv heads allow no more.
The rollout has 16 replicas of 4 devices, which decode the 4096 sequences of a step concurrently.

Minutes and result: not measured yet. By its plan (python -m jaxrl.plan, docs/how_to/planner.md) it
fits a v5p 4x4x4: at most 7 of 96 GiB per chip plus the KV pages of all sequences, and 67 s or more
per step at the chips' peak rates.
"""

from ml_collections import ConfigDict

from configs.bases.math_grpo import math_grpo


def get_config() -> ConfigDict:
    config = math_grpo()
    config.name = "grpo_7b"

    return config
