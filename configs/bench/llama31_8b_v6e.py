"""Training of Llama 3.1 8B on 8 chips of TPU v6e, as tpu-recipes with MaxText.

    python -m jaxrl.plan --config=configs/bench/llama31_8b_v6e.py --topology=v6e:2x4 --job=sft

Hardware: TPU v6e-8.

Result: published 3.443 s per step of 24 sequences of 8,192 tokens
(github.com/AI-Hypercomputer/tpu-recipes/blob/main/training/trillium/Llama3.1-8B-MaxText/v6e-8).
Here: not measured; MaxText offloads layer inputs, q, k, v and o, and
learner.remat=full computes them again.
"""

from ml_collections import ConfigDict

from jaxrl.config.bases.published import tpu_training


def get_config() -> ConfigDict:
    config = tpu_training("Llama-3.1-8B-Instruct", seq_len=8192, sequences=3, n_devices=8)
    config.name = "llama31_8b_v6e"
    config.learner.remat = "full"
    return config
