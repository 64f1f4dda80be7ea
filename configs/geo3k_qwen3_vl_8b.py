"""GRPO of Qwen3-VL-8B-Instruct on Geometry3K, questions about diagrams, on 8 GPUs of 80 GB.

    uv run python scripts/prepare_geo3k.py --input=path/to/geometry3k --output=data/geo3k
    python -m jaxrl.train --config=configs/geo3k_qwen3_vl_8b.py

Hardware: one node of 8 H100.

Data, batches, lengths, learning rate and KL are those of verl's example for this model: four
updates of 128 prompts per step, 5 responses of up to 2048 tokens to each. The vision tower is
frozen here. The reward is that of the answer in \\boxed{}, without verl's share of 10 % for the
format.

Mesh: fsdp 8. The rollout has 8 replicas of one GPU.

Memory: the compiled plan needs 64.2 of the 67.7 GiB that rollout.memory_utilization allows, with KV
pages freed during updates (docs/plans/geo3k_qwen3_vl_8b.h100-8.txt).

Minutes and result: not measured yet. By the plan a step takes 45 s or more, 73 s calibrated, with
prompts of 400 tokens and responses of 512 on average. On TPU v5p 2x2x2 (8 chips) an update needs
63.8 of 81.4 GiB and a step takes 73 s or more, 133 s calibrated
(docs/plans/geo3k_qwen3_vl_8b.v5p-2x2x2.txt).
"""

from ml_collections import ConfigDict

from jaxrl.config import default_config


def get_config() -> ConfigDict:
    config = default_config()
    config.name = "geo3k_qwen3_vl_8b"
    config.total_epochs = 15
    config.model.path = "Qwen/Qwen3-VL-8B-Instruct"

    config.data.train = ("data/geo3k/train.parquet",)
    config.data.val = ("data/geo3k/test.parquet",)
    config.data.images = True
    config.data.prompts_per_step = 512
    config.data.max_prompt_len = 1024
    config.data.max_response_len = 2048

    config.rollout.n = 5
    config.rollout.max_num_batched_tokens = 8192
    config.rollout.page_len = 128
    config.rollout.release_kv = True

    config.algorithm.kl_coef = 0.01

    config.mesh.fsdp = 8

    config.learner.lr = 1e-6
    config.learner.mini_batch_prompts = 128  # four updates per step
    config.learner.token_budget = 12288
    config.learner.buckets = (3072,)
    config.learner.remat = "dots"

    config.reward.functions = ("math",)
    config.reward.workers = 8

    config.eval.every = 5
    config.checkpoint.every = 20
    config.checkpoint.best_metric = "val/reward"
    return config
