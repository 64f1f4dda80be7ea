"""GRPO of gpt-oss-120b, a mixture of experts, on GSM8K and MATH, on 64 devices.

    python -m jaxrl.train --config=configs/grpo_gpt_oss_120b.py --config.run_dir=/shared/runs/moe

Hardware: TPU v5p 4x4x4 (64 chips). The run folder must be on a shared disk.
configs/grpo_gpt_oss_120b_h100.py is the same run on 64 GPUs.

Data, batches and lengths are those of configs/grpo_30b_a3b.py.

Mesh: replica 2 x fsdp 32; the replicas share the optimizer state and the gradients
(learner.zero=2). A device computes all experts for its own 32k tokens of a micro-batch, so no token
is exchanged. The rollout has 16 replicas of 4 chips.

Memory: the optimizer state is in host memory. Layers are stacked (model.layers), so that programs
compile in a tenth of the time.

Minutes and result: not measured yet. By the planner's formulas an update needs 70.5 of the 81.4 GiB
that rollout.memory_utilization allows, and a step takes 143 s or more. Not compiled yet.
"""

from ml_collections import ConfigDict

from jaxrl.config.bases.math_grpo import math_grpo


def get_config() -> ConfigDict:
    config = math_grpo()
    config.name = "grpo_gpt_oss_120b"
    config.model.path = "openai/gpt-oss-120b"
    config.model.layers = "stacked"
    config.mesh.replica = 2
    config.mesh.fsdp = 32
    config.mesh.tensor = 1
    config.rollout.tensor = 1
    config.rollout.expert = 4
    config.rollout.max_num_seqs = 64

    config.learner.xla = ("overlap",)  # on TPU: collectives on the SparseCores
    config.learner.zero = 2
    config.learner.offload = ("optimizer",)
    config.learner.token_budget = 32768
    config.learner.remat = "attention"
    return config
