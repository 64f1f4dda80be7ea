"""GRPO of DeepSeek-V3, all weights, on GSM8K and MATH, on 256 devices.

    python -m jaxrl.train --config=configs/grpo_deepseek_v3.py --config.run_dir=/shared/runs/v3

Hardware: TPU v5p 4x8x8 (256 chips). The run folder must be on a shared disk.
configs/grpo_deepseek_v3_h100.py is the same run on 256 GPUs, and
configs/grpo_deepseek_v3_lora_h100.py trains adapters on 64.

Data, batches and lengths are those of configs/grpo_30b_a3b.py.

Mesh: fsdp 64 x expert 2 x tensor 2. The rollout has 8 replicas of 32 chips, tensor 8 x expert 4.

Memory: the optimizer state is in host memory, 30 GiB per chip. Layers are stacked
(model.layers), so that programs compile in a tenth of the time.

Minutes and result: not measured yet. By its plan (docs/plans/grpo_deepseek_v3.v5p-4x8x8.txt) an
update needs 67.7 of the 81.4 GiB that rollout.memory_utilization allows, the rollout 55.5 without
KV pages, and a step takes 1,649 s or more at the chips' peak rates, 1,522 s of it in the rollout.
"""

from ml_collections import ConfigDict

from jaxrl.config.bases.math_grpo import math_grpo


def get_config() -> ConfigDict:
    config = math_grpo()
    config.name = "grpo_deepseek_v3"
    config.model.path = "deepseek-ai/DeepSeek-V3"
    config.model.layers = "stacked"
    config.mesh.fsdp = 64
    config.mesh.expert = 2
    config.mesh.tensor = 2
    config.rollout.tensor = 8
    config.rollout.expert = 4

    config.learner.xla = ("overlap",)  # on TPU: collectives on the SparseCores
    config.learner.offload = ("optimizer",)
    config.learner.token_budget = 16384
    config.learner.remat = "full"
    return config
