"""GRPO of Qwen2.5-7B-Instruct on GSM8K and MATH, on 64 GPUs of 80 GB.

    python -m jaxrl.train --config=configs/grpo_7b_h100.py --config.run_dir=/shared/runs/grpo_7b

Hardware: 8 nodes of 8 H100. The run folder must be on a shared disk.

Data, batches and lengths are those of configs/grpo_7b.py.

Mesh: replica 8 x fsdp 8. The weights are sharded within a node and gathered over NVLink; only
gradients cross the nodes' network. The rollout has 16 replicas of 4 GPUs.

Minutes and result: not measured yet. By its plan (docs/plans/grpo_7b_h100.h100-64.txt) a step takes
38 s or more at the chips' peak rates. docs/LOG.md compares meshes.
"""

from ml_collections import ConfigDict

from configs.grpo_7b import get_config as grpo_7b


def get_config() -> ConfigDict:
    config = grpo_7b()
    config.name = "grpo_7b_h100"
    config.mesh.replica = 8
    config.mesh.fsdp = 8
    config.mesh.tensor = 1
    config.rollout.tensor = 4
    return config
