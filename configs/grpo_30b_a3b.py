"""GRPO of Qwen3-30B-A3B, a mixture of experts, on GSM8K and MATH, on 64 devices.

    python -m jaxrl.train --config=configs/grpo_30b_a3b.py --config.run_dir=/shared/runs/grpo_30b

Hardware: TPU v5p 4x4x4 (64 chips), or 8 nodes of 8 GPUs. The run folder must be on a shared disk.

Data: parquet in verl's schema. scripts/prepare_gsm8k.py writes GSM8K; MATH needs the same columns
and data_source "lighteval/MATH". The reward function is chosen by data_source.

Mesh: fsdp 8 x expert 8. A device holds an eighth of each of 16 of a layer's 128 experts; batch rows
are sharded over all 64. Tokens are exchanged within groups of 8 devices: the GPUs of a node.

Minutes and result: not measured yet. Checked without such hardware: the config resolves for 64
devices, and the whole update type-checks at the model's shape on an abstract mesh of 8 x 8
(tests/config/test_configs.py). The plan for the 64 chips is
docs/plans/grpo_30b_a3b.v5p-4x4x4.txt. On GPUs the expert matmuls still run as a loop of small
matmuls (docs/concepts/moe.md).
"""

from ml_collections import ConfigDict

from configs.bases.math_grpo import math_grpo


def get_config() -> ConfigDict:
    config = math_grpo()
    config.name = "grpo_30b_a3b"
    config.model.path = "Qwen/Qwen3-30B-A3B"
    config.mesh.fsdp = 8
    config.mesh.expert = 8
    config.mesh.tensor = 1

    # Replicas of 8 devices with attention sharded over the four kv heads. With expert 8 alone, each
    # device would read the KV cache of all 256 sequences.
    config.rollout.tensor = 4
    config.rollout.expert = 2

    config.learner.xla = ("overlap",)  # on TPU: collectives on the SparseCores
    config.learner.token_budget = 4096  # leaves memory for the exchange of tokens and experts
    return config
