"""Training of MaxText's 32B model on 64 chips of TPU v5p.

    python -m jaxrl.plan --config=configs/bench/maxtext_32b_v5p.py --topology=v5p:4x4x4 --job=sft

Hardware: TPU v5p-128 (64 chips).

Result: published 328 TFLOP/s per chip, 6 sequences of 2,048 tokens each: 7.29 s per step
(github.com/AI-Hypercomputer/maxtext/blob/main/src/maxtext/configs/tpu/v5p/README.md;
its FLOPs count all pairs of queries and keys, 2.39e15 per chip and step).
Here: not measured; learner.remat=dots for MaxText's minimal; the same mesh.
"""

from ml_collections import ConfigDict

from jaxrl.config.bases.published import tpu_training


def get_config() -> ConfigDict:
    config = tpu_training("MaxText-32B", seq_len=2048, sequences=6, n_devices=64)
    config.name = "maxtext_32b_v5p"
    config.mesh.fsdp = 16
    config.mesh.tensor = 4
    config.learner.token_budget = 24 * 2048  # of the 4 devices of the tensor axis
    config.learner.remat = "dots"
    return config
