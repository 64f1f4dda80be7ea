"""GRPO of Qwen2.5-1.5B-Instruct on GSM8K, on a TPU v5e-8.

    python -m jaxrl.train --config=configs/grpo_1p5b.py --config.run_dir=runs/grpo_1p5b

Hardware: TPU v5e 2x4 (8 chips of 16 GB), FSDP over all devices; the rollout has 4 replicas of 2
devices. configs/grpo_1p5b_h100.py has the settings for one GPU of 80 GB.

Data: scripts/prepare_gsm8k.py writes GSM8K in verl's schema.

Minutes and result: not measured yet. docs/plans/grpo_1p5b.v5e-2x4.txt is the plan: memory, and the
time at peak rates.
"""

from ml_collections import ConfigDict

from jaxrl.config.bases.math_grpo import gsm8k_grpo


def get_config() -> ConfigDict:
    config = gsm8k_grpo()
    config.name = "grpo_1p5b"
    config.total_epochs = 10
    config.rollout.tensor = 2
    config.rollout.release_kv = True  # the update takes its memory
    config.learner.token_budget = 16384
    config.learner.remat = "attention"
    config.checkpoint.every = 20
    return config
