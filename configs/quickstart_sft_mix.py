"""The quickstart with demonstrations in every update: RL with an SFT mix.

    uv run python -m jaxrl.train --config=configs/quickstart_sft_mix.py

Task, batches and steps are those of configs/quickstart.py. Every update also has the cross-entropy
of 16 demonstrations, packed in the rows of the rollouts, with a weight that falls from 0.5 to 0
over 24 steps: it shows the form of an answer while rewards are rare.

Result: measured for the first two steps only: cross-entropy of the demonstrations 4.33, then 3.22
nats per token.
"""

from pathlib import Path

from ml_collections import ConfigDict

from jaxrl.config.config_file import load_config


def get_config() -> ConfigDict:
    config = load_config(str(Path(__file__).with_name("quickstart.py")))
    config.name = "quickstart_sft_mix"
    config.data.demonstrations = ("task:addition?digits=1,2&size=512&split=train",)
    config.data.demonstrations_per_step = 16
    config.algorithm.parts = ("demonstrations?weight=0.5&final_weight=0.0&ramp=24",)
    return config
