"""PPO of SmolLM2-135M-Instruct on addition, with a separate critic, on two CPU cores.

    uv run python -m jaxrl.train --config=configs/quickstart_ppo.py

Task, model and budget are those of configs/quickstart.py. Advantages come from the values of a
second SmolLM2 instead of a comparison of the samples of a prompt. Only the critic is trained in the
first four steps.

Minutes and result: measured for the first 48 steps, with validation every 12
(`scripts/learning_curves.py algorithms PPO`): greedy accuracy 0.02, 0.46, 0.62, 0.60. 17 s per step
at best on one core, 8 GB of memory.
"""

from pathlib import Path

from ml_collections import ConfigDict

from jaxrl.config.config_file import load_config


def get_config() -> ConfigDict:
    config = load_config(str(Path(__file__).with_name("quickstart.py")))
    config.name = "quickstart_ppo"
    config.algorithm.advantage = "gae"
    config.critic.lr = 1e-5
    config.critic.weight_decay = 0.0
    config.critic.warmup_steps = 4
    return config
