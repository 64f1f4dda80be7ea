"""GRPO of DeepSeek-V3 with adapters over an int8 base, on GSM8K and MATH, on 64 GPUs of 80 GB.

    python -m jaxrl.train --config=configs/grpo_deepseek_v3_lora_h100.py \\
        --config.run_dir=/shared/runs/v3_lora

Hardware: 8 nodes of 8 H100. The run folder must be on a shared disk.

Data and lengths are those of configs/grpo_30b_a3b.py, with a quarter of its prompts in a step.
Adapters of rank 32 are on the projections of attention. Those of dense layers and of experts have
the same names in adapter files, so both have none.

Mesh: fsdp 4 x expert 4 x tensor 4. The rollout has two replicas of 32 GPUs, tensor 8 x expert 4,
which read an int8 copy of the weights. Layers are stacked (model.layers), so that programs compile
in a tenth of the time.

Minutes and result: not measured yet. By its plan
(docs/plans/grpo_deepseek_v3_lora_h100.h100-64.txt) an update needs 29.5 of the 67.7 GiB that
rollout.memory_utilization allows, the rollout 41.1 without KV pages, and a step takes 917 s or more
at the GPUs' peak rates, 604 s of it in the rollout.
"""

from ml_collections import ConfigDict

from jaxrl.config.bases.math_grpo import math_grpo


def get_config() -> ConfigDict:
    config = math_grpo()
    config.name = "grpo_deepseek_v3_lora_h100"
    config.model.path = "deepseek-ai/DeepSeek-V3"
    config.model.layers = "stacked"
    config.data.prompts_per_step = 128

    config.mesh.replica = 1
    config.mesh.fsdp = 4
    config.mesh.expert = 4
    config.mesh.tensor = 4
    config.rollout.tensor = 8
    config.rollout.expert = 4
    config.rollout.dtype = "int8"
    config.rollout.release_kv = True
    config.algorithm.correction = "token_tis"  # int8 weights sample the rollouts

    config.lora.rank = 32
    config.lora.base_dtype = "int8"
    config.lora.exclude_modules = ("gate_proj", "up_proj", "down_proj")
    config.learner.lr = 1e-5
    config.learner.mini_batch_prompts = 32
    config.learner.token_budget = 8192
    config.learner.mlp_chunk = 2048
    config.learner.remat = "full"
    return config
