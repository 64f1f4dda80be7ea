"""GRPO of Qwen2.5-72B-Instruct with 32k tokens of context, on a TPU v5p slice of 256 chips.

    python -m jaxrl.train --config=configs/grpo_70b_longctx.py --config.run_dir=/shared/runs/70b

Hardware: TPU v5p 4x8x8 (256 chips). The run folder must be on a shared disk.

Data: parquet in verl's schema with long solutions, for example DAPO-Math-17k.

Mesh: fsdp 4 x sequence 8 x tensor 8. Each device holds 4k tokens of a row; in attention 64 devices
share the 64 heads (Ulysses), and 8 kv heads allow no larger tensor axis. The rollout has 32
replicas of 8 devices. Backward keeps the outputs of all matrix products, 9 GiB. The chips'
SparseCores run a part of the collectives while the TensorCores compute (learner.xla=overlap).

Minutes and result: not measured. docs/plans/ has the plan: memory, and the time at peak rates.
"""

from ml_collections import ConfigDict

from configs.bases.math_grpo import gsm8k_grpo


def get_config() -> ConfigDict:
    config = gsm8k_grpo()
    config.name = "grpo_70b_longctx"
    config.total_epochs = 1
    config.model.path = "Qwen/Qwen2.5-72B-Instruct"
    config.mesh.fsdp = 4
    config.mesh.sequence = 8
    config.mesh.tensor = 8

    config.data.train = ("data/dapo_math/train.parquet",)
    config.data.val = ()
    config.data.prompts_per_step = 256
    config.data.max_prompt_len = 2048
    config.data.max_response_len = 30720

    config.rollout.max_num_seqs = 64  # per replica; there are 32
    config.rollout.max_num_batched_tokens = 8192
    config.rollout.page_len = 256

    config.algorithm.kl_coef = 0.0
    config.algorithm.clip_high = 0.28

    config.learner.token_budget = 32768
    config.learner.remat = "dots"
    config.learner.xla = ("overlap",)
    config.learner.buckets = (32768,)

    config.reward.functions = ("math",)
    config.reward.workers = 32

    config.eval.every = 0
    config.checkpoint.best_metric = ""
    return config
