"""Multi-turn GRPO on two CPU cores: SmolLM2-135M-Instruct learns to call a tool.

    uv run python -m jaxrl.train --config=configs/calculator_tool_smollm2.py

The task and the rewards are those of configs/calculator_smollm2.py. The calculator is the function
`calculate`, which the chat template `chatml_tools` describes by its JSON schema; the model writes
<tool_call>{"name": "calculate", "arguments": {"expression": "27 * 58"}}</tool_call> and reads the
result in a `tool` message. The prompt contains one worked example.
"""

from ml_collections import ConfigDict

from jaxrl.config.bases.smollm2 import smollm2_episodes


def get_config() -> ConfigDict:
    config = smollm2_episodes()
    config.name = "calculator_tool_smollm2"
    config.data.train = ("task:multiplication?digits=2&size=4096&split=train",)
    config.data.val = ("task:multiplication?digits=2&size=64&split=val",)
    config.data.chat_template = "chatml_tools"
    config.data.max_prompt_len = 288
    config.data.max_response_len = 128

    config.env.name = "calculator_tool?call_reward=0.2&examples=1"
    config.env.max_turns = 3
    config.learner.buckets = (416,)

    config.rollout.sampling.stop = ("</tool_call>",)
    config.eval.sampling.stop = ("</tool_call>",)
    return config
