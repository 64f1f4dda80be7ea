"""GRPO of GLM-4.5-Air, a mixture of experts, with adapters, on GSM8K and MATH, on 8 devices.

    python -m jaxrl.train --config=configs/grpo_glm_4_5_air.py

Hardware: one node of 8 H100 of 80 GB, or TPU v5p 2x2x2 (8 chips).

Data and lengths are those of configs/grpo_30b_a3b.py, with a quarter of its prompts in a step.
Adapters of rank 32 are on the projections of attention. Those of the dense layer and of experts
have the same names in adapter files, so both have none.

Mesh: fsdp 8. The rollout has one replica of 8 devices, which reads a copy of the weights. Layers
are stacked (model.layers), so that programs compile in a tenth of the time.

Memory: in rollouts training's weights are in host memory, and KV pages are freed during updates
(rollout.release_kv).

Minutes and result: not measured yet. Compiled for 8 H100, the rollout needs 50.8 GiB and the update
43.7 of the 67.7 GiB that rollout.memory_utilization allows, and a step takes 270 s or more, 498 s
calibrated (docs/plans/grpo_glm_4_5_air.h100-8.txt). For 8 chips of v5p they need 50.8 and 40.2 of
81.4 GiB, and a step takes 420 s or more (docs/plans/grpo_glm_4_5_air.v5p-2x2x2.txt).
"""

from ml_collections import ConfigDict

from jaxrl.config.bases.math_grpo import math_grpo


def get_config() -> ConfigDict:
    config = math_grpo()
    config.name = "grpo_glm_4_5_air"
    config.model.path = "zai-org/GLM-4.5-Air"
    config.model.layers = "stacked"
    config.data.prompts_per_step = 128

    config.mesh.fsdp = 8
    config.mesh.tensor = 1
    config.rollout.tensor = 8
    config.rollout.release_kv = True

    config.lora.rank = 32
    config.lora.exclude_modules = ("gate_proj", "up_proj", "down_proj")
    config.learner.lr = 1e-5
    config.learner.mini_batch_prompts = 32
    config.learner.token_budget = 16384
    config.learner.offload = ("policy",)
    config.learner.remat = "full"
    return config
