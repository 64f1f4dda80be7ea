"""GRPO of Qwen3.5-9B on GSM8K and MATH, on 8 GPUs of 80 GB.

    python -m jaxrl.train --config=configs/grpo_qwen3_5_9b_h100.py

Hardware: one node of 8 H100.

Data and lengths are those of configs/grpo_qwen3_5_9b.py, with a quarter of its prompts in a step.

Mesh: fsdp 8. The rollout has 2 replicas of 4 GPUs.

Memory: the KV pages and states are freed during updates (rollout.release_kv). An update needs 65.2
of the 67.7 GiB that rollout.memory_utilization allows.

Minutes and result: not measured yet. By its plan (docs/plans/grpo_qwen3_5_9b_h100.h100-8.txt, with
model.layers=stacked) a step takes 41 s or more at the chips' peak rates, and 58 s with kernels one
after the other.
"""

from pathlib import Path

from ml_collections import ConfigDict

from jaxrl.config.config_file import load_config


def get_config() -> ConfigDict:
    config = load_config(str(Path(__file__).with_name("grpo_qwen3_5_9b.py")))
    config.name = "grpo_qwen3_5_9b_h100"
    config.data.prompts_per_step = 64
    config.learner.mini_batch_prompts = 16
    config.mesh.replica = 1
    config.mesh.fsdp = 8
    config.rollout.tensor = 4
    config.rollout.release_kv = True
    config.learner.xla = ()
    return config
