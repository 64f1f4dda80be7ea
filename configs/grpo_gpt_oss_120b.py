"""GRPO of gpt-oss-120b, a mixture of experts, on GSM8K and MATH, on 64 devices.

    python -m jaxrl.train --config=configs/grpo_gpt_oss_120b.py --config.run_dir=/shared/runs/moe

Hardware: TPU v5p 4x4x4 (64 chips). The run folder must be on a shared disk.
configs/grpo_gpt_oss_120b_h100.py is the same run on 64 GPUs.

Data, batches and lengths are those of configs/grpo_30b_a3b.py.

Mesh: replica 2 x fsdp 32; the replicas share the optimizer state and the gradients
(learner.zero=2). A device computes all experts for its own 32k tokens of a micro-batch, so no token
is exchanged. In the rollout 4 chips share the experts, and every chip has its own sequences. With
rollout.tensor=4, a chip would have 720 features of each expert, which the compiler copies to
another layout: 152 GiB of temporaries (docs/LOG.md).

Memory: the optimizer state, the reference and, in rollouts, the policy are in host memory. Layers
are stacked (model.layers), so that programs compile in a tenth of the time.

Minutes and result: not measured yet. By its plan (docs/plans/grpo_gpt_oss_120b.v5p-4x4x4.txt) an
update needs 55.8 of the 81.4 GiB that rollout.memory_utilization allows, the rollout 68.8 without
KV pages, and a step takes 475 s or more at the chips' peak rates, 391 s of it in the rollout.
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
    config.rollout.release_kv = True

    config.learner.xla = ("overlap",)  # on TPU: collectives on the SparseCores
    config.learner.zero = 2
    config.learner.offload = ("optimizer", "reference", "policy")
    config.learner.token_budget = 32768
    config.learner.remat = "attention"
    return config
