"""A 7B reward model from preference pairs, on one node of 8 GPUs or a v5p-16 slice.

    python -m jaxrl.reward_model --config=configs/reward_model_7b.py --config.model.path=MODEL \\
        --config.data.train=pairs.parquet

MODEL is a Hugging Face folder; pairs.parquet has the columns prompt, chosen and rejected, as
UltraFeedback has.

Minutes and result: not measured yet. The plan for the slice, with answers of maximum length: 20 of
96 GiB per chip, 9.4 s per step at peak rates.

    python -m jaxrl.plan --config=configs/reward_model_7b.py --job=reward_model \\
        --topology=v5p:2x2x2
"""

from ml_collections import ConfigDict

from jaxrl.config.bases.preference import preference_7b


def get_config() -> ConfigDict:
    config = preference_7b()
    config.name = "reward_model_7b"
    config.learner.lr = 9e-6
    return config
