"""GRPO of SmolLM2-135M-Instruct as the model of an agent program, on two CPU cores.

    uv run python -m jaxrl.train --config=configs/calculator_agent_smollm2.py

The task is that of configs/calculator_smollm2.py: products of two-digit numbers. Here the program
that evaluates <calc>27 * 58</calc> and returns the reward is an agent, which calls the engine of
the run with the openai client (configs/agents/calculator.py).

Minutes and result: 60 to 120 s per step on two busy cores. At temperature 1, 6 of 32 answers are
right before training, and 31 of 32 after 8 steps (mean reward of a step: 0.27 to 1.15). To check:
`python -m jaxrl.evaluate --config=configs/calculator_agent_smollm2.py --limit=32 --temperature=1`.
"""

from ml_collections import ConfigDict

from jaxrl.config.bases.smollm2 import smollm2_episodes


def get_config() -> ConfigDict:
    config = smollm2_episodes()
    config.name = "calculator_agent_smollm2"
    config.data.train = ("task:multiplication?digits=2&size=4096&split=train",)
    config.data.val = ("task:multiplication?digits=2&size=64&split=val",)

    config.env.agent = "configs.agents.calculator:agent?call_reward=0.2"
    config.env.max_turns = 3
    config.env.timeout_s = 120.0  # 64 programs start at once on two cores, each with its client
    return config
