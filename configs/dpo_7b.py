"""DPO of a 7B model on preference pairs, on one node of 8 GPUs or a v5p-16 slice.

    python -m jaxrl.dpo --config=configs/dpo_7b.py --config.model.path=MODEL \\
        --config.data.train=pairs.parquet

MODEL is a Hugging Face folder; pairs.parquet has the columns prompt, chosen and rejected, as
UltraFeedback has.

Minutes and result: not measured yet. The plan for the slice, with answers of maximum length: 25 of
96 GiB per chip, 12 s per step at peak rates.

    python -m jaxrl.plan --config=configs/dpo_7b.py --job=dpo --topology=v5p:2x2x2
"""

from ml_collections import ConfigDict

from jaxrl.config.bases.preference import preference_7b


def get_config() -> ConfigDict:
    config = preference_7b()
    config.name = "dpo_7b"
    config.preference.beta = 0.1
    config.learner.lr = 5e-7
    return config
