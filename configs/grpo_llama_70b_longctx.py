"""GRPO of Llama-3.1-70B-Instruct with 32k tokens of context, on 16 nodes of 8 GPUs.

    python -m jaxrl.train --config=configs/grpo_llama_70b_longctx.py --config.run_dir=runs/l70b

Hardware: 16 nodes of 8 GPUs with 80 GB (128 GPUs), or as many larger ones. The run folder must be
on a shared disk.

Data: parquet in verl's schema with long solutions, for example DAPO-Math-17k.

Mesh: the layout of reference for this size and context is tensor 8 x sequence 8 x pipeline 2, with
tensor 4 in the rollout. This config uses tensor 8 x sequence 8 x FSDP 2 instead (mesh.stage=2 in
place of mesh.fsdp=2 gives the other). It has as many weights, gradients and optimizer states per
GPU as two pipeline stages, no pipeline bubble, and an all-gather of two shards per layer instead
of transfers between stages. The tensor axis stays within a node. Ulysses exchanges 64
heads over 8 x 8 devices, one each. The rollout has 32 replicas of 4 GPUs.

Published figures: none that could be cited for this layout. For the size, verl's guide lists GRPO
of Qwen2-70B on 32 H800 as the least that runs (github.com/volcengine/verl,
docs/perf/device_tuning.rst).

Minutes and result here: not measured.
"""

from ml_collections import ConfigDict

from jaxrl.config.bases.long_context import long_context_grpo


def get_config() -> ConfigDict:
    config = long_context_grpo()
    config.name = "grpo_llama_70b_longctx"
    config.model.path = "meta-llama/Llama-3.1-70B-Instruct"
    config.mesh.fsdp = 2
    config.mesh.sequence = 8
    config.mesh.tensor = 8

    config.rollout.tensor = 4

    config.learner.remat = "dots"
    return config
