"""GRPO of Qwen2.5-1.5B-Instruct on GSM8K, on one H100.

    python -m jaxrl.train --config=configs/grpo_1p5b_h100.py --config.run_dir=runs/grpo_1p5b

Hardware: one GPU of 80 GB. Data, batches and lengths are those of configs/grpo_1p5b.py.

Minutes and result: not measured yet. By its plan (docs/plans/grpo_1p5b_h100.h100-1.txt) backward
keeps all activations of a micro-batch, 18 GiB, and recomputes nothing; docs/benchmarks.md compares
the settings of learner.remat.
"""

from ml_collections import ConfigDict

from jaxrl.config.bases.math_grpo import gsm8k_grpo


def get_config() -> ConfigDict:
    config = gsm8k_grpo()
    config.name = "grpo_1p5b_h100"
    config.total_epochs = 10
    config.rollout.tensor = 1
    config.learner.remat = "none"
    config.checkpoint.every = 20
    return config
