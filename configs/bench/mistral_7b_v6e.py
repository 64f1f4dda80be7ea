"""Training of Mistral 7B on 8 chips of TPU v6e, as tpu-recipes with MaxText.

    python -m jaxrl.plan --config=configs/bench/mistral_7b_v6e.py --topology=v6e:2x4 --job=sft

Hardware: TPU v6e-8.

Result: published 6.320 s per step of 48 sequences of 8,192 tokens
(github.com/AI-Hypercomputer/tpu-recipes/blob/main/training/trillium/Mistral-7B-MaxText).
Here: not measured; MaxText offloads layer inputs, q, k, v and o, and
learner.remat=offload only inputs.
"""

from ml_collections import ConfigDict

from jaxrl.config.bases.published import tpu_training


def get_config() -> ConfigDict:
    config = tpu_training("Mistral-7B-Instruct-v0.3", seq_len=8192, sequences=6, n_devices=8)
    config.name = "mistral_7b_v6e"
    config.learner.remat = "offload"
    return config
