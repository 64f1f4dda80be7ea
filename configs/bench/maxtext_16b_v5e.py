"""Training of MaxText's 16B model on 256 chips of TPU v5e.

    python -m jaxrl.plan --config=configs/bench/maxtext_16b_v5e.py --topology=v5e:16x16 --job=sft

Hardware: TPU v5e-256.

Result: published 120 TFLOP/s per chip, 6 sequences of 2,048 tokens each: 10.3 s per step
(github.com/AI-Hypercomputer/maxtext/blob/main/src/maxtext/configs/tpu/v5e/README.md;
its FLOPs count all pairs of queries and keys, 1.24e15 per chip and step).
Here: not measured; the same remat and mesh.
"""

from ml_collections import ConfigDict

from jaxrl.config.bases.published import tpu_training


def get_config() -> ConfigDict:
    config = tpu_training("MaxText-16B", seq_len=2048, sequences=6, n_devices=256)
    config.name = "maxtext_16b_v5e"
    config.learner.remat = "full"
    return config
