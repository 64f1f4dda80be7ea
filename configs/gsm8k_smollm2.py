"""GRPO of SmolLM2-135M-Instruct on GSM8K, on two CPU cores: a check of the data path.

    uv run python scripts/prepare_gsm8k.py --input=FOLDER --output=data/gsm8k
    uv run python -m jaxrl.train --config=configs/gsm8k_smollm2.py

FOLDER holds train.jsonl and test.jsonl from github.com/openai/grade-school-math.

The model solves about 3 in 100 of these problems and is too small to learn them on a CPU. The
config exercises real data, prompts of any length and parsed answers; the reward does not rise.
Before training, greedy, it solves none of the first 32 test problems, and 23 of the 32 answers are
truncated at 192 tokens.

Minutes and result: two steps with validation and export completed, 104 and 170 s per step on one
busy core; mean reward of their 64 responses 0.016 and 0.047.
"""

from ml_collections import ConfigDict

from jaxrl.config.bases.smollm2 import smollm2_gsm8k


def get_config() -> ConfigDict:
    config = smollm2_gsm8k()
    config.name = "gsm8k_smollm2"
    config.total_steps = 20

    config.data.train = ("data/gsm8k/train.parquet",)
    config.data.val = ("data/gsm8k/test.parquet",)
    config.data.prompts_per_step = 8

    config.rollout.n = 8
    config.rollout.max_num_seqs = 64
    config.rollout.max_num_batched_tokens = 1024

    config.reward.functions = ("gsm8k?method=flexible",)  # the last number, with or without "####"

    config.eval.every = 10
    config.checkpoint.every = 10
    return config
