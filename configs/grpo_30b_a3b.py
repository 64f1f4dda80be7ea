"""GRPO of Qwen3-30B-A3B, a mixture of experts, on GSM8K and MATH, on 64 devices.

    python -m jaxrl.train --config=configs/grpo_30b_a3b.py --config.run_dir=/shared/runs/grpo_30b

Hardware: TPU v5p 4x4x4 (64 chips). The run folder must be on a shared disk.
configs/grpo_30b_a3b_h100.py is the same run on 64 GPUs.

Data: parquet in verl's schema. scripts/prepare_gsm8k.py writes GSM8K; MATH needs the same columns
and data_source "lighteval/MATH". The reward function is chosen by data_source.

Mesh: replica 4 x fsdp 16; the replicas share the optimizer state and the gradients
(learner.zero=2). A device computes all experts for its own 32k tokens of a micro-batch, so no token
is exchanged, and a gather of a layer's experts serves many tokens.

Minutes and result: not measured yet. Checked without such hardware: the config resolves for 64
devices, and the whole update type-checks at the model's shape on an abstract mesh of 4 x 16
(tests/config/test_configs.py). The plan for the 64 chips is
docs/plans/grpo_30b_a3b.v5p-4x4x4.txt.
"""

from ml_collections import ConfigDict

from jaxrl.config.bases.math_grpo import math_grpo


def get_config() -> ConfigDict:
    config = math_grpo()
    config.name = "grpo_30b_a3b"
    config.model.path = "Qwen/Qwen3-30B-A3B"
    config.mesh.replica = 4
    config.mesh.fsdp = 16
    config.mesh.tensor = 1

    # One kv head per device: 16 replicas, which decode all sequences at once.
    config.rollout.tensor = 4

    config.learner.xla = ("overlap",)  # on TPU: collectives on the SparseCores
    config.learner.zero = 2
    config.learner.token_budget = 32768
    config.learner.remat = "attention"
    return config
