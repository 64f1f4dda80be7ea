"""GRPO of SmolLM2-135M-Instruct on addition, on two CPU cores.

    uv run python -m jaxrl.train --config=configs/quickstart.py

The task is sums of one- and two-digit numbers ("What is 27 + 58?"). The reward is 1 for a response
that ends with the right number and an end-of-sequence token. Validation: greedy answers to 128
two-digit sums that are not in the training set.

Minutes and result: 11 minutes on 2 cores (AVX-512), including compilation. Greedy accuracy 0.00
before training, 0.61 after 24 steps, 0.77 after 48, 0.84 after 72.
"""

from ml_collections import ConfigDict

from jaxrl.config.bases.smollm2 import smollm2


def get_config() -> ConfigDict:
    config = smollm2()
    config.name = "quickstart"
    config.total_steps = 72

    config.data.train = ("task:addition?digits=1,2&size=8192&split=train",)
    config.data.val = ("task:addition?digits=2&size=128&split=val",)
    config.data.max_prompt_len = 64
    config.data.max_response_len = 16
    config.data.chat_template = "chatml"  # the model's own template adds a system prompt

    config.learner.token_budget = 512
    config.reward.functions = ("last_number",)

    config.eval.every = 24
    config.checkpoint.every = 24
    config.checkpoint.best_metric = "val/reward"
    return config
