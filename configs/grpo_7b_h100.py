"""GRPO of Qwen2.5-7B-Instruct on GSM8K and MATH, on 64 GPUs of 80 GB.

    python -m jaxrl.train --config=configs/grpo_7b_h100.py --config.run_dir=/shared/runs/grpo_7b

Hardware: 8 nodes of 8 H100. The run folder must be on a shared disk.

Data, batches and lengths are those of configs/grpo_7b.py.

Mesh: replica 8 x fsdp 8. The weights are sharded within a node and gathered over NVLink; only
gradients cross the nodes' network. The rollout has 16 replicas of 4 GPUs.

Memory: backward keeps gate, up and the output of attention (learner.remat=mlp), 44 GiB with 16,384
tokens per GPU. The KV pages are freed during updates (rollout.release_kv). dots needs a smaller
token budget; then the gradients cross the network more often, and a step takes longer.

Minutes and result: not measured yet. By its plan (docs/plans/grpo_7b_h100.h100-64.txt) a step takes
35 s or more at the chips' peak rates, and 40 s with kernels one after the other. docs/LOG.md
compares meshes and settings of learner.remat.
"""

from pathlib import Path

from ml_collections import ConfigDict

from jaxrl.config.config_file import load_config


def get_config() -> ConfigDict:
    config = load_config(str(Path(__file__).with_name("grpo_7b.py")))
    config.name = "grpo_7b_h100"
    config.mesh.replica = 8
    config.mesh.fsdp = 8
    config.mesh.tensor = 1
    config.rollout.tensor = 4
    config.rollout.release_kv = True
    config.learner.remat = "mlp"
    return config
