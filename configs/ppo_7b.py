"""PPO of Qwen2.5-7B-Instruct on GSM8K and MATH, with a critic of the same size, on 64 devices.

    python -m jaxrl.train --config=configs/ppo_7b.py --config.run_dir=/shared/runs/ppo_7b

Hardware: TPU v5p 4x4x4 (64 chips), or 8 nodes of 8 GPUs. The run folder must be on a shared disk.

Data: as in configs/grpo_7b.py. Differences to it: one response per prompt, and values from a second
7B model that starts from the policy's weights and is trained alone for the first ten steps.

Minutes and result: not measured yet. The plan for the 64 chips, with answers of maximum length: 16
of 96 GiB per chip including KV pages, 30 s per step at peak rates (8 rollout, 6 scoring, 16
updates).

    python -m jaxrl.plan --config=configs/ppo_7b.py --topology=v5p:4x4x4
"""

from ml_collections import ConfigDict

from jaxrl.config.bases.math_grpo import math_grpo


def get_config() -> ConfigDict:
    config = math_grpo()
    config.name = "ppo_7b"
    config.data.prompts_per_step = 1024

    config.rollout.n = 1
    config.rollout.max_num_seqs = 64

    config.algorithm.advantage = "gae"
    config.algorithm.kl = "k1"
    config.algorithm.kl_in = "reward"

    config.learner.mini_batch_prompts = 256  # four updates per step

    config.critic.lr = 1e-5
    config.critic.warmup_steps = 10
    config.critic.token_budget = 32768
    return config
