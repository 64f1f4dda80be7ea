"""GRPO of Qwen3.5-35B-A3B, a mixture of experts, on GSM8K and MATH, on 64 devices.

    python -m jaxrl.train --config=configs/grpo_qwen3_5_35b_a3b.py --config.run_dir=/shared/runs/moe

Hardware: TPU v5p 4x4x4 (64 chips). The run folder must be on a shared disk.
configs/grpo_qwen3_5_35b_a3b_h100.py is the same run on 64 GPUs.

Data, batches and lengths are those of configs/grpo_30b_a3b.py.

Mesh: replica 4 x fsdp 16; the replicas share the optimizer state and the gradients
(learner.zero=2). A device computes all experts for its own 32k tokens of a micro-batch, so no token
is exchanged. The rollout has 16 replicas of 4 devices: two kv heads allow rollout.tensor=2, and
rollout.expert=2 divides the experts once more.

Minutes and result: not measured yet. By its plan (docs/plans/grpo_qwen3_5_35b_a3b.v5p-4x4x4.txt) a
step takes 81 s or more at the chips' peak rates, and 197 s by the compiler's estimate.
"""

from ml_collections import ConfigDict

from jaxrl.config.bases.math_grpo import math_grpo


def get_config() -> ConfigDict:
    config = math_grpo()
    config.name = "grpo_qwen3_5_35b_a3b"
    config.model.path = "Qwen/Qwen3.5-35B-A3B"
    config.mesh.replica = 4
    config.mesh.fsdp = 16
    config.mesh.tensor = 1

    # One kv head per device. States of gated DeltaNet are copied over rollout.expert. By the
    # formulas of --search, 2 is faster than 1 and 4. With 1, GPUs of 80 GB have room for the states
    # and for the KV pages of a third of the sequences of a step.
    config.rollout.tensor = 2
    config.rollout.expert = 2

    config.learner.xla = ("overlap",)  # on TPU: collectives on the SparseCores
    config.learner.zero = 2
    config.learner.token_budget = 32768
    config.learner.remat = "attention"
    return config
