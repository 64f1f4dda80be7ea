"""GRPO of Qwen models on GSM8K and MATH, for accelerators."""

from ml_collections import ConfigDict

from jaxrl.config import default_config


def gsm8k_grpo() -> ConfigDict:
    """GRPO of Qwen2.5-1.5B-Instruct on GSM8K, the base of the configs for large models."""
    config = default_config()
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
    config.checkpoint.every = 10
    config.checkpoint.best_metric = "val/reward"
    return config


def math_grpo() -> ConfigDict:
    """GRPO of Qwen2.5-7B-Instruct on GSM8K and MATH, with long responses, for 64 devices."""
    config = gsm8k_grpo()
    config.total_epochs = 15
    config.model.path = "Qwen/Qwen2.5-7B-Instruct"
    config.mesh.fsdp = 16
    config.mesh.tensor = 4

    config.data.train = ("data/gsm8k/train.parquet", "data/math/train.parquet")
    config.data.val = ("data/gsm8k/test.parquet", "data/math/test.parquet")
    config.data.prompts_per_step = 512
    config.data.max_prompt_len = 1024
    config.data.max_response_len = 3072

    config.rollout.max_num_batched_tokens = 8192
    config.rollout.page_len = 128

    config.learner.mini_batch_prompts = 128  # four updates per step
    config.learner.token_budget = 16384
    config.learner.buckets = (4096,)

    config.reward.functions = ("by_source",)
    config.reward.workers = 16
    return config
