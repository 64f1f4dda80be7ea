"""DPO of a 7B model on pairs of answers, on one node of 8 GPUs or a v5p-16 slice.

    python -m jaxrl.dpo --config=configs/dpo_7b.py --config.model.path=MODEL --config.data.train=pairs.parquet

MODEL is a Hugging Face folder; pairs.parquet has the columns prompt, chosen and rejected, as UltraFeedback's has. Minutes
and result: not measured yet. Its plan for the slice, with the longest answers: 25 of 96 GiB a chip, 12 s a step at peak rates.

    python -m jaxrl.plan --config=configs/dpo_7b.py --job=dpo --topology=v5p:2x2x2
"""

from ml_collections import ConfigDict

from jaxrl.config import default_config


def get_config() -> ConfigDict:
    config = default_config()
    config.name = "dpo_7b"
    config.total_epochs = 1
    config.model.path = "Qwen2.5-7B-Instruct"

    config.data.train = ("pairs.parquet",)
    config.data.prompts_per_step = 128  # pairs
    config.data.max_prompt_len = 1024
    config.data.max_response_len = 1024

    config.preference.beta = 0.1

    config.learner.lr = 5e-7
    config.learner.lr_schedule = "cosine"
    config.learner.warmup_steps = 50
    config.learner.weight_decay = 0.0
    config.learner.token_budget = 8192

    config.checkpoint.every = 100
    return config
