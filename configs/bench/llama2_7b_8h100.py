"""Training of Llama 2 7B on 8 H100, as JAX-Toolbox with MaxText.

    python -m jaxrl.plan --config=configs/bench/llama2_7b_8h100.py --topology=h100:8 --job=sft

Hardware: one node of 8 H100 SXM.

Result: published 0.721 s per step of 16 sequences of 4,096 tokens, remat minimal_flash
(github.com/NVIDIA/JAX-Toolbox/blob/main/docs/frameworks/maxtext/README.md, table of configs).
Here: not measured; learner.remat=dots is the nearest policy.
"""

from ml_collections import ConfigDict

from jaxrl.config.bases.published import training


def get_config() -> ConfigDict:
    config = training("Llama-2-7b-hf", seq_len=4096, sequences=2, n_devices=8)
    config.name = "llama2_7b_8h100"
    config.learner.remat = "dots"
    return config
