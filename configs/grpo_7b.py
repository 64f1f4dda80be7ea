"""GRPO teaches Qwen2.5-7B-Instruct grade-school and competition mathematics, on a TPU v5p-128 or 64 GPUs.

    python -m jaxrl.train --config=configs/grpo_7b.py --config.run_dir=/shared/runs/grpo_7b

Hardware: TPU v5p 4x4x4 (64 chips), or 8 nodes of 8 GPUs. The run folder is one that all hosts see.

Data: parquet in verl's schema. scripts/prepare_gsm8k.py writes GSM8K; MATH is expected with the same columns and
data_source "lighteval/MATH". The reward follows data_source.

Mesh: fsdp 16 x tensor 4. Tensor shards stay within a node's GPUs; 4 kv heads allow no more. The rollout has 16
replicas of 4 devices, which decode the 4096 sequences of a step at one time.

Minutes and result: not measured yet. It fits a v5p 4x4x4 by its plan (python -m jaxrl.plan, docs/how_to/planner.md): at most 8 of
96 GiB a chip beside the KV pages of all sequences, and a step of 67 s or more at the chips' peak rates.
"""

from ml_collections import ConfigDict

from jaxrl.config import default_config


def get_config() -> ConfigDict:
    config = default_config()
    config.name = "grpo_7b"
    config.total_epochs = 15
    config.model.path = "Qwen/Qwen2.5-7B-Instruct"
    config.mesh.fsdp = 16
    config.mesh.tensor = 4

    config.data.train = ("data/gsm8k/train.parquet", "data/math/train.parquet")
    config.data.val = ("data/gsm8k/test.parquet", "data/math/test.parquet")
    config.data.prompts_per_step = 512
    config.data.max_prompt_len = 1024
    config.data.max_response_len = 3072

    config.rollout.n = 8
    config.rollout.max_num_seqs = 256
    config.rollout.max_num_batched_tokens = 8192
    config.rollout.page_len = 128

    config.algorithm.kl_coef = 0.001

    config.learner.lr = 1e-6
    config.learner.warmup_steps = 10
    config.learner.mini_batch_prompts = 128  # four updates a step
    config.learner.token_budget = 16384
    config.learner.buckets = (4096,)

    config.reward.functions = ("by_source",)
    config.reward.workers = 16

    config.eval.every = 10
    config.checkpoint.every = 10
    config.checkpoint.best_metric = "val/reward"
    return config
