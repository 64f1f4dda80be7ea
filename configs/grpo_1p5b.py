"""GRPO teaches Qwen2.5-1.5B-Instruct grade-school mathematics, on one 80 GB GPU or a TPU v5e-8.

    python -m jaxrl.train --config=configs/grpo_1p5b.py --config.run_dir=runs/grpo_1p5b

Hardware: one GPU of 80 GB, or TPU v5e 2x4 (8 chips of 16 GB). The mesh shards over whatever there is.

Data: scripts/prepare_gsm8k.py writes GSM8K in verl's schema.

Minutes and result: not measured yet. docs/plans/ has the plan of both machines: what fits, and the time at peak rates.
"""

from ml_collections import ConfigDict

from jaxrl.config import default_config


def get_config() -> ConfigDict:
    config = default_config()
    config.name = "grpo_1p5b"
    config.total_epochs = 10
    config.model.path = "Qwen/Qwen2.5-1.5B-Instruct"

    config.data.train = ("data/gsm8k/train.parquet",)
    config.data.val = ("data/gsm8k/test.parquet",)
    config.data.prompts_per_step = 128
    config.data.max_prompt_len = 512
    config.data.max_response_len = 1024

    config.rollout.n = 8
    config.rollout.max_num_seqs = 256
    config.rollout.max_num_batched_tokens = 4096

    config.algorithm.kl_coef = 0.001

    config.learner.lr = 1e-6
    config.learner.warmup_steps = 10
    config.learner.mini_batch_prompts = 64
    config.learner.token_budget = 8192
    config.learner.buckets = (2048,)

    config.reward.functions = ("gsm8k",)
    config.reward.workers = 8

    config.eval.every = 10
    config.checkpoint.every = 20
    config.checkpoint.best_metric = "val/reward"
    return config
