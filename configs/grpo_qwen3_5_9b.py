"""GRPO of Qwen3.5-9B on GSM8K and MATH, on a TPU v5p-64.

    python -m jaxrl.train --config=configs/grpo_qwen3_5_9b.py --config.run_dir=/shared/runs/qwen3_5

Hardware: TPU v5p 4x4x2 (32 chips); configs/grpo_qwen3_5_9b_h100.py is the same run on 8 GPUs. The
run folder must be on a shared disk.

Data, batches and lengths are those of configs/grpo_7b.py, with half of its prompts in a step.

Mesh: replica 2 x fsdp 16. The rollout has 8 replicas of 4 devices, as 4 kv heads allow no more.

Minutes and result: not measured yet. By its plan (docs/plans/grpo_qwen3_5_9b.v5p-4x4x2.txt) a step
takes 71 s or more at the chips' peak rates, and 157 s by the compiler's estimate.
"""

from ml_collections import ConfigDict

from jaxrl.config.bases.math_grpo import math_grpo


def get_config() -> ConfigDict:
    config = math_grpo()
    config.name = "grpo_qwen3_5_9b"
    config.model.path = "Qwen/Qwen3.5-9B"
    config.data.prompts_per_step = 256
    config.learner.mini_batch_prompts = 64
    config.mesh.replica = 2
    config.mesh.fsdp = 16
    config.mesh.tensor = 1
    config.rollout.tensor = 4
    config.learner.remat = "mlp"
    config.learner.xla = ("overlap",)
    return config
