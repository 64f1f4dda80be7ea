"""Multi-turn GRPO on two CPU cores: SmolLM2-135M-Instruct learns to use a calculator.

    uv run python -m jaxrl.train --config=configs/calculator_smollm2.py

The task is products of two-digit numbers, which the model cannot compute itself, in up to three
turns. The model may write <calc>27 * 58</calc>, which ends its turn, and reads
<result>1566</result>. The prompt contains one worked example. The reward is 1 for the right last
number of the last turn, and 0.2 more for a first call that can be evaluated
(jaxrl/environments/builtin/calculator.py).

Before training, at temperature 1: 0.41 calls per episode and 0.31 +- 0.18 of the answers right (16
questions, 2 samples each; without the example no call and none right).

Minutes and result: 50 to 150 s per step on two busy cores. Greedy accuracy on 32 questions: 0.66
before training, 1.00 after four steps. Mean reward of the steps 0.22, 0.75, 0.84, 1.01; calls per
episode 0.33 to 0.95.
"""

from ml_collections import ConfigDict

from jaxrl.config.bases.smollm2 import smollm2_episodes


def get_config() -> ConfigDict:
    config = smollm2_episodes()
    config.name = "calculator_smollm2"
    config.data.train = ("task:multiplication?digits=2&size=4096&split=train",)
    config.data.val = ("task:multiplication?digits=2&size=64&split=val",)

    config.env.name = "calculator?call_reward=0.2&examples=1"
    config.env.max_turns = 3

    config.rollout.sampling.stop = ("</calc>",)
    config.eval.sampling.stop = ("</calc>",)
    return config
