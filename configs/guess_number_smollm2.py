"""Multi-turn GRPO on two CPU cores: SmolLM2-135M-Instruct learns to find a number by guessing.

    uv run python -m jaxrl.train --config=configs/guess_number_smollm2.py

The model has at most five guesses for a number from 0 to 18; the environment answers a wrong guess
with "higher" or "lower". The reward is 1 minus 0.1 for each guess before the right one
(jaxrl/environments/builtin/guess_number.py). The numbers are the answers of generated sums, which
the game does not show. The prompt contains one game that is played well: without it the model does
not play (mean reward 0.00 to 0.09 over nine steps).

Minutes and result: 110 s per step on one busy core. Greedy, it finds 0.33 of the 16 validation
numbers before training and 0.50 after four steps; mean reward of the steps 0.19, 0.26, 0.34, 0.38.
"""

from ml_collections import ConfigDict

from jaxrl.config.bases.smollm2 import smollm2_episodes


def get_config() -> ConfigDict:
    config = smollm2_episodes()
    config.name = "guess_number_smollm2"
    config.data.train = ("task:addition?digits=1&size=4096&split=train",)
    config.data.val = ("task:addition?digits=1&size=16&split=val",)

    config.env.name = "guess_number?most=18&tries=5&example=True"
    config.env.max_turns = 5

    config.eval.pass_reward = 0.5  # found, with any number of guesses
    return config
