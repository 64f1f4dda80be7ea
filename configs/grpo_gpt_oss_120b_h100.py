"""GRPO of gpt-oss-120b, a mixture of experts, on GSM8K and MATH, on 64 GPUs of 80 GB.

    python -m jaxrl.train --config=configs/grpo_gpt_oss_120b_h100.py \\
        --config.run_dir=/shared/runs/moe

Hardware: 8 nodes of 8 H100. The run folder must be on a shared disk.

Data, batches and lengths are those of configs/grpo_gpt_oss_120b.py.

Mesh: replica 4 x fsdp 4 x tensor 4; the replicas share the optimizer state and the gradients
(learner.zero=2). Tensor parallelism stays within a node. The rollout has 8 replicas of 8 GPUs.

Memory: the optimizer state, the sums of gradients and the reference are in host memory. An
update needs 38.1 of the 67.7 GiB that rollout.memory_utilization allows, the rollout 50.4 without
KV pages.

Minutes and result: not measured yet. By its plan (docs/plans/grpo_gpt_oss_120b_h100.h100-64.txt) a
step takes 162 s or more at the chips' peak rates, and 191 s with kernels one after the other. HBM
traffic of decode limits the rollout (45 % of the step), collectives limit scoring and updates.
"""

from pathlib import Path

from ml_collections import ConfigDict

from jaxrl.config.config_file import load_config


def get_config() -> ConfigDict:
    config = load_config(str(Path(__file__).with_name("grpo_gpt_oss_120b.py")))
    config.name = "grpo_gpt_oss_120b_h100"
    config.mesh.replica = 4
    config.mesh.fsdp = 4
    config.mesh.tensor = 4
    config.rollout.tensor = 8
    config.rollout.expert = 1
    config.rollout.max_num_seqs = 256
    config.learner.xla = ()
    config.learner.offload = ("optimizer", "gradients", "reference")
    config.learner.token_budget = 65536
    config.learner.remat = "offload"
    return config
