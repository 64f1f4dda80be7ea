"""Training on preference pairs."""

from ml_collections import ConfigDict

from jaxrl.config import default_config


def preference_7b() -> ConfigDict:
    """Qwen2.5-7B-Instruct on pairs of answers, on 8 devices."""
    config = default_config()
    config.total_epochs = 1
    config.model.path = "Qwen2.5-7B-Instruct"

    config.data.train = ("pairs.parquet",)
    config.data.prompts_per_step = 128  # pairs
    config.data.max_prompt_len = 1024
    config.data.max_response_len = 1024

    config.learner.lr_schedule = "cosine"
    config.learner.warmup_steps = 50
    config.learner.weight_decay = 0.0
    config.learner.token_budget = 8192

    config.checkpoint.every = 100
    return config
