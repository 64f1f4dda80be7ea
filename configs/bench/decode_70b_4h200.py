"""Decode of Llama 3 70B on 4 H200, as vLLM's benchmark of latency.

    python -m jaxrl.plan --config=configs/bench/decode_70b_4h200.py --topology=h200:4

Hardware: 4 H200 SXM. Only the decode program is of interest: the training state does not fit.

Result: published 2,078 ms for 8 requests of 32 + 128 tokens, 16.2 ms per token
(buildkite.com/vllm/performance-benchmark/builds/9515, latency_llama70B_tp4, 2024).
Here: not measured; the published time per token includes the scheduler and prefill of others.
"""

from ml_collections import ConfigDict

from jaxrl.config.bases.published import decoding


def get_config() -> ConfigDict:
    config = decoding("Llama-3.1-70B-Instruct", sequences=8, prompt_len=32, response_len=128)
    config.name = "decode_70b_4h200"
    config.mesh.fsdp = 1
    config.mesh.tensor = 4
    return config
