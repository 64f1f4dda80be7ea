"""GRPO teaches Qwen3-30B-A3B, a mixture of experts, grade-school and competition mathematics, on 64 devices.

    python -m jaxrl.train --config=configs/grpo_30b_a3b.py --config.run_dir=/shared/runs/grpo_30b_a3b

Hardware: TPU v5p 4x4x4 (64 chips), or 8 nodes of 8 GPUs. The run folder is one that all hosts see.

Data: parquet in verl's schema. scripts/prepare_gsm8k.py writes GSM8K; MATH is expected with the same columns and
data_source "lighteval/MATH". The reward follows data_source.

Mesh: fsdp 8 x expert 8. A device keeps 16 of the 128 experts of a layer, and an eighth of each; rows of a batch are
shared out over all 64. Tokens go to their experts within groups of 8 devices: a node's GPUs.

Minutes and result: not measured yet. What is checked without such hardware: the config resolves for 64 devices, and
the whole update type-checks at the model's shape on an abstract mesh of 8 x 8 (tests/config/test_configs.py). Its plan for
the 64 chips is docs/plans/grpo_30b_a3b.v5p-4x4x4.txt. On GPUs the experts' products still run as a loop of small products
(docs/concepts/moe.md).
"""

from ml_collections import ConfigDict

from jaxrl.config import default_config


def get_config() -> ConfigDict:
    config = default_config()
    config.name = "grpo_30b_a3b"
    config.total_epochs = 15
    config.model.path = "Qwen/Qwen3-30B-A3B"
    config.mesh.fsdp = 8
    config.mesh.expert = 8

    config.data.train = ("data/gsm8k/train.parquet", "data/math/train.parquet")
    config.data.val = ("data/gsm8k/test.parquet", "data/math/test.parquet")
    config.data.prompts_per_step = 512
    config.data.max_prompt_len = 1024
    config.data.max_response_len = 3072

    config.rollout.n = 8
    config.rollout.tensor = 4  # replicas of 8 devices, whose attention is cut by the four kv heads:
    config.rollout.expert = (
        2  # with expert 8 alone each device would read the keys of all 256 sequences
    )
    config.rollout.max_num_seqs = 256
    config.rollout.max_num_batched_tokens = 8192
    config.rollout.page_len = 128

    config.algorithm.kl_coef = 0.001

    config.learner.lr = 1e-6
    config.learner.warmup_steps = 10
    config.learner.mini_batch_prompts = 128  # four updates a step
    config.learner.token_budget = 4096  # the exchange of tokens and experts needs room
    config.learner.buckets = (4096,)

    config.reward.functions = ("by_source",)
    config.reward.workers = 16

    config.eval.every = 10
    config.checkpoint.every = 10
    config.checkpoint.best_metric = "val/reward"
    return config
