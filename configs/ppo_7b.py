"""PPO teaches Qwen2.5-7B-Instruct grade-school mathematics, with a critic of the same size, on a TPU v5p-128 or 64 GPUs.

    python -m jaxrl.train --config=configs/ppo_7b.py --config.run_dir=/shared/runs/ppo_7b

Hardware: TPU v5p 4x4x4 (64 chips), or 8 nodes of 8 GPUs. The run folder is one that all hosts see.

Data: as in configs/grpo_7b.py, of which this is the PPO: one response a prompt, values from a second 7B that begins as the
policy does and learns alone for ten steps.

Minutes and result: not measured yet. Its plan for the 64 chips, with the longest answers: 16 of 96 GiB a chip with the KV pages, 30 s a step
at peak rates (8 of them rollout, 6 scoring, 16 updates).

    python -m jaxrl.plan --config=configs/ppo_7b.py --topology=v5p:4x4x4
"""

from ml_collections import ConfigDict

from jaxrl.config import default_config


def get_config() -> ConfigDict:
    config = default_config()
    config.name = "ppo_7b"
    config.total_epochs = 15
    config.model.path = "Qwen/Qwen2.5-7B-Instruct"
    config.mesh.fsdp = 16
    config.mesh.tensor = 4

    config.data.train = ("data/gsm8k/train.parquet", "data/math/train.parquet")
    config.data.val = ("data/gsm8k/test.parquet", "data/math/test.parquet")
    config.data.prompts_per_step = 1024
    config.data.max_prompt_len = 1024
    config.data.max_response_len = 3072

    config.rollout.n = 1
    config.rollout.max_num_seqs = 64
    config.rollout.max_num_batched_tokens = 8192
    config.rollout.page_len = 128

    config.algorithm.advantage = "gae"
    config.algorithm.kl = "k1"
    config.algorithm.kl_in = "reward"
    config.algorithm.kl_coef = 0.001

    config.learner.lr = 1e-6
    config.learner.warmup_steps = 10
    config.learner.mini_batch_prompts = 256  # four updates a step
    config.learner.token_budget = 16384
    config.learner.buckets = (4096,)

    config.critic.lr = 1e-5
    config.critic.warmup_steps = 10
    config.critic.token_budget = 32768

    config.reward.functions = ("by_source",)
    config.reward.workers = 16

    config.eval.every = 10
    config.checkpoint.every = 10
    config.checkpoint.best_metric = "val/reward"
    return config
