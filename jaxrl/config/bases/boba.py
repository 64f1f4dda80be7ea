"""AReaL's boba recipe: R1-Distill-Qwen models on mathematics with long responses."""

from ml_collections import ConfigDict

from jaxrl.config import default_config


def boba() -> ConfigDict:
    """The settings of AReaL's v0.2 release that do not depend on the model or the cluster.

    PPO without a critic and with gamma = lambda = 1 and advantages that are normalized over all
    tokens is REINFORCE++. AReaL's rewards are +5 and -5; the normalization makes 1 and 0 the same.
    """
    config = default_config()
    config.total_steps = 1000

    config.data.train = ("data/boba_106k.jsonl",)
    config.data.val = ("data/aime24.jsonl",)
    config.data.prompts_per_step = 512
    config.data.max_prompt_len = 1024
    config.data.max_response_len = 27648

    config.rollout.n = 16
    config.rollout.max_num_seqs = 64
    config.rollout.max_num_batched_tokens = 8192
    config.rollout.page_len = 128

    config.algorithm.advantage = "reinforce_plus_plus"
    config.algorithm.policy_loss = "ppo_clip"
    config.algorithm.aggregation = "token_mean"
    config.algorithm.kl_coef = 0.0

    config.learner.lr = 2e-5
    config.learner.eps = 1e-5
    config.learner.mini_batch_prompts = 128  # four updates per step
    config.learner.token_budget = 28672  # one sequence of prompt and response
    config.learner.buckets = (28672,)

    config.reward.functions = ("math?boxed_only=true",)
    config.reward.workers = 32

    config.eval.every = 50
    config.eval.n = 32
    config.eval.sampling.temperature = 1.0
    config.checkpoint.every = 50
    config.checkpoint.best_metric = "val/reward"
    return config
