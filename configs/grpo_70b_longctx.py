"""GRPO of Qwen2.5-72B-Instruct with 32k tokens of context, on a TPU v5p slice of 256 chips.

    python -m jaxrl.train --config=configs/grpo_70b_longctx.py --config.run_dir=/shared/runs/70b

Hardware: TPU v5p 4x8x8 (256 chips). The run folder must be on a shared disk.

Data: parquet in verl's schema with long solutions, for example DAPO-Math-17k.

Mesh: replica 8 x fsdp 32; the replicas share the optimizer state and the gradients
(learner.zero=2). A chip computes whole rows of 32k tokens and recomputes the layers in backward, so
activations are not exchanged. A gather of weights serves 32k tokens, and the SparseCores run it
while the TensorCores compute (learner.xla=overlap). The rollout has 32 replicas of 8 devices, and
the KV pages are released during updates. A mini-batch needs 256 rows, one per chip, so its last
rows may be of 16k tokens.

Minutes and result: not measured. docs/plans/ has the plan: memory, and the time at peak rates.
"""

from ml_collections import ConfigDict

from jaxrl.config.bases.long_context import long_context_grpo


def get_config() -> ConfigDict:
    config = long_context_grpo()
    config.name = "grpo_70b_longctx"
    config.model.path = "Qwen/Qwen2.5-72B-Instruct"
    config.mesh.replica = 8
    config.mesh.fsdp = 32

    config.rollout.tensor = 8
    config.rollout.release_kv = True

    config.learner.zero = 2
    config.learner.buckets = (16384, 32768)
    return config
