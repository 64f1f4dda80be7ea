"""Decode of Llama 3.3 70B on 8 chips of TPU v6e, as tpu-recipes with vLLM.

    python -m jaxrl.plan --config=configs/bench/decode_70b_v6e.py --topology=v6e:2x4

Hardware: TPU v6e-8. Only the decode program is of interest: the training state does not fit.

Result: published 25.4 ms per token with 64 requests of 1,000 + 1,000 tokens at a time
(github.com/AI-Hypercomputer/tpu-recipes/blob/main/inference/trillium/vLLM/Llama3.x).
Here: not measured; the published time per token includes the scheduler and prefill of others.
"""

from ml_collections import ConfigDict

from jaxrl.config.bases.published import decoding


def get_config() -> ConfigDict:
    config = decoding("Llama-3.1-70B-Instruct", sequences=64, prompt_len=1000, response_len=1000)
    config.name = "decode_70b_v6e"
    config.mesh.fsdp = 1
    config.mesh.tensor = 8
    config.model.layers = "stacked"
    return config
