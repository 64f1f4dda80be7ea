"""LoRA of Qwen3.5-9B on Geometry3K, questions about diagrams, on 8 GPUs of 80 GB.

    uv run python scripts/prepare_geo3k.py --input=path/to/geometry3k --output=data/geo3k
    python -m jaxrl.train --config=configs/geo3k_qwen3_5_9b_lora.py

Hardware: one node of 8 H100.

Data, batches and lengths are those of configs/geo3k_qwen3_vl_8b.py. Adapters are on all linear
layers of the language model; the tower, the projector and the base are frozen. Their rank is 32,
the largest that the gates of the linear attention allow. Their scale, 1/2, and the learning rate
are those of verl's example of LoRA on images.

Mesh: fsdp 8. The rollout has 8 replicas of one GPU.

Memory: the compiled plan needs 21.9 of the 67.7 GiB that rollout.memory_utilization allows in
rollouts, and 14.9 in updates, with KV pages freed during updates
(docs/plans/geo3k_qwen3_5_9b_lora.h100-8.txt).

Minutes and result: not measured yet. By the plan a step takes 49 s or more, 98 s calibrated, with
prompts of 400 tokens and responses of 512 on average.
"""

from pathlib import Path

from ml_collections import ConfigDict

from jaxrl.config.config_file import load_config


def get_config() -> ConfigDict:
    config = load_config(str(Path(__file__).with_name("geo3k_qwen3_vl_8b.py")))
    config.name = "geo3k_qwen3_5_9b_lora"
    config.model.path = "Qwen/Qwen3.5-9B"
    config.lora.rank = 32
    config.lora.alpha = 16.0
    config.lora.target_modules = ("all-linear",)
    config.learner.lr = 3e-6
    config.learner.remat = "full"
    return config
