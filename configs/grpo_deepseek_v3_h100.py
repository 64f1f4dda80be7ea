"""GRPO of DeepSeek-V3, all weights, on GSM8K and MATH, on 256 GPUs of 80 GB.

    python -m jaxrl.train --config=configs/grpo_deepseek_v3_h100.py \\
        --config.run_dir=/shared/runs/v3

Hardware: 32 nodes of 8 H100. The run folder must be on a shared disk.

Data, batches and lengths are those of configs/grpo_deepseek_v3.py.

Mesh: fsdp 32 x expert 4 x tensor 2. The rollout has 8 replicas of 32 GPUs, tensor 8 x expert 4,
which read an int8 copy of the weights.

Memory: the optimizer state, the sums of gradients and the reference are in host memory, 47 GiB per
GPU.

Minutes and result: not measured yet. By its plan (docs/plans/grpo_deepseek_v3_h100.h100-256.txt) an
update needs 54.1 of the 67.7 GiB that rollout.memory_utilization allows, and a step takes 1,342 s
or more at the GPUs' peak rates.
"""

from pathlib import Path

from ml_collections import ConfigDict

from jaxrl.config.config_file import load_config


def get_config() -> ConfigDict:
    config = load_config(str(Path(__file__).with_name("grpo_deepseek_v3.py")))
    config.name = "grpo_deepseek_v3_h100"
    config.mesh.fsdp = 32
    config.mesh.expert = 4
    config.rollout.dtype = "int8"
    config.algorithm.correction = "token_tis"  # int8 weights sample the rollouts
    config.learner.xla = ()
    config.learner.offload = ("optimizer", "gradients", "reference")
    config.learner.remat = "offload"
    return config
