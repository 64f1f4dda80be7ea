"""GRPO of any model on GSM8K: the start for a model that has no config here.

    python -m jaxrl.train --config=configs/grpo.py --config.model.path=Qwen/Qwen3-4B

Hardware: any. The pages in docs/models/ name the mesh, the token budget and the remat policy for
each model on common devices; python -m jaxrl.plan --search finds them for others.

Data: scripts/prepare_gsm8k.py writes GSM8K in verl's schema. A step trains on 128 prompts with 8
responses each, of at most 512 + 1,024 tokens.

Minutes and result: not measured; python -m jaxrl.plan gives the time at peak rates.
"""

from ml_collections import ConfigDict

from jaxrl.config.bases.math_grpo import gsm8k_grpo


def get_config() -> ConfigDict:
    config = gsm8k_grpo()
    config.name = "grpo"
    return config
