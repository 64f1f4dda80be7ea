"""Training of Llama 2 7B on one A3 machine, as MaxText.

    python -m jaxrl.plan --config=configs/bench/llama2_7b_a3.py --topology=h100:8 --job=sft

Hardware: one node of 8 H100 SXM.

Result: published 492 TFLOP/s per GPU, 4 sequences of 4,096 tokens each: 1.53 s per step
(github.com/AI-Hypercomputer/maxtext/blob/main/src/maxtext/configs/gpu/a3/llama_2_7b/README.md;
its FLOPs count all pairs of queries and keys, 7.55e14 per GPU and step).
Here: not measured; remat minimal_with_context keeps a little more than learner.remat=dots.
"""

from ml_collections import ConfigDict

from jaxrl.config.bases.published import training


def get_config() -> ConfigDict:
    config = training("Llama-2-7b-hf", seq_len=4096, sequences=4, n_devices=8)
    config.name = "llama2_7b_a3"
    config.learner.remat = "dots"
    return config
