"""A reward model from SmolLM2-135M-Instruct and pairs of right and wrong sums, on two CPU cores.

    uv run python scripts/make_pairs.py --output=data/pairs
    uv run python -m jaxrl.reward_model --config=configs/reward_model_smollm2.py

Minutes and result: 3 of the 40 steps were run, next to other programs: 190 CPU-seconds with the
start and one validation, so about as long as configs/dpo_smollm2.py. The result is not measured.
"""

from ml_collections import ConfigDict

from jaxrl.config.bases.smollm2 import smollm2_pairs


def get_config() -> ConfigDict:
    config = smollm2_pairs()
    config.name = "reward_model_smollm2"
    config.learner.lr = 1e-5
    return config
