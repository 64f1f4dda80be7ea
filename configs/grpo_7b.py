"""GRPO of Qwen2.5-7B-Instruct on GSM8K and MATH, on a TPU v5p-128.

    python -m jaxrl.train --config=configs/grpo_7b.py --config.run_dir=/shared/runs/grpo_7b

Hardware: TPU v5p 4x4x4 (64 chips); configs/grpo_7b_h100.py is the same run on 64 GPUs. The run
folder must be on a shared disk.

Data: parquet in verl's schema. scripts/prepare_gsm8k.py writes GSM8K; MATH needs the same columns
and data_source "lighteval/MATH". The reward function is chosen by data_source.

Mesh: replica 4 x fsdp 16. No two devices share a row, and backward keeps the outputs of all
matrix products (learner.remat=dots): memory is not short. fsdp 16 x tensor 4 reduces and gathers
the residual stream in every layer; the gathers of fsdp 64 become all-reduces, which take twice as
long (docs/LOG.md). The rollout has 16 replicas of 4 devices, as 4 kv heads allow no more; they
decode the 4096 sequences of a step concurrently. The chips' SparseCores run the collectives while
the TensorCores compute (learner.xla=overlap).

Minutes and result: not measured yet. By its plan (docs/plans/grpo_7b.v5p-4x4x4.txt) an update needs
61 of 96 GiB per chip, next to 14 GiB of KV pages for all sequences. A step takes 61 s or more at
the chips' peak rates, and 71 s with kernels one after the other.
"""

from ml_collections import ConfigDict

from jaxrl.config.bases.math_grpo import math_grpo


def get_config() -> ConfigDict:
    config = math_grpo()
    config.name = "grpo_7b"
    config.mesh.replica = 4
    config.mesh.fsdp = 16
    config.mesh.tensor = 1
    config.rollout.tensor = 4
    config.learner.remat = "dots"
    config.learner.xla = ("overlap",)
    return config
