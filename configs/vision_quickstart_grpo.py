"""GRPO of the tiny model that configs/vision_quickstart.py trains, on two CPU cores.

uv run python -m jaxrl.train --config=configs/vision_quickstart_grpo.py
"""

from ml_collections import ConfigDict

from jaxrl.config import default_config


def get_config() -> ConfigDict:
    config = default_config()
    config.name = "vision_quickstart_grpo"
    config.total_steps = 200
    config.model.path = "runs/vision_quickstart/hf"

    config.data.train = ("data/pictures/train.parquet",)
    config.data.val = ("data/pictures/val.parquet",)
    config.data.images = True
    config.data.prompts_per_step = 16
    config.data.max_prompt_len = 96
    config.data.max_response_len = 8

    config.rollout.n = 16
    config.rollout.max_num_seqs = 64
    config.rollout.max_num_batched_tokens = 2048
    config.rollout.steps_per_dispatch = 4

    config.reward.functions = ("last_number",)

    config.learner.lr = 1e-3
    config.learner.warmup_steps = 10
    config.learner.weight_decay = 0.0
    config.learner.token_budget = 2048
    config.learner.halvings = 0
    config.learner.remat = "none"

    config.eval.every = 25
    config.checkpoint.best_metric = "val/reward"
    return config
