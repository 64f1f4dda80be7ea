"""Decode of Llama 3.1 8B on one H200, as vLLM's benchmark of latency.

    python -m jaxrl.plan --config=configs/bench/decode_8b_h200.py --topology=h200:1

Hardware: one H200 SXM. Only the decode program is of interest: the training state does not fit.

Result: published 833 ms for 8 requests of 32 + 128 tokens, 6.5 ms per token
(buildkite.com/vllm/performance-benchmark/builds/9515, latency_llama8B_tp1, 2024).
Here: not measured; the published time per token includes the scheduler and prefill of others.
"""

from ml_collections import ConfigDict

from jaxrl.config.bases.published import decoding


def get_config() -> ConfigDict:
    config = decoding("Llama-3.1-8B-Instruct", sequences=8, prompt_len=32, response_len=128)
    config.name = "decode_8b_h200"
    return config
