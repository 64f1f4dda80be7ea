"""GRPO with 32k tokens of context, for models of 70B parameters."""

from ml_collections import ConfigDict

from jaxrl.config.bases.math_grpo import gsm8k_grpo


def long_context_grpo() -> ConfigDict:
    """Long solutions of mathematical problems. A config adds its model, mesh and recomputation."""
    config = gsm8k_grpo()
    config.total_epochs = 1

    config.data.train = ("data/dapo_math/train.parquet",)
    config.data.val = ()
    config.data.prompts_per_step = 256
    config.data.max_prompt_len = 2048
    config.data.max_response_len = 30720

    config.rollout.max_num_seqs = 64  # per replica; there are 32
    config.rollout.max_num_batched_tokens = 8192
    config.rollout.page_len = 256

    config.algorithm.kl_coef = 0.0
    config.algorithm.clip_high = 0.28

    config.learner.token_budget = 32768
    config.learner.buckets = (32768,)
    config.learner.xla = ("overlap",)

    config.reward.functions = ("math",)
    config.reward.workers = 32

    config.eval.every = 0
    config.checkpoint.best_metric = ""
    return config
