"""Memory traffic and work of a forward pass next to its products with weights, per token."""

import functools

from jaxrl.kernels.gated_delta.chunked import CHUNK, MAX_WORK
from jaxrl.models.config import DecoderConfig
from jaxrl.models.layers.experts import ROOM

# Fitted to a compiled plan of Qwen3.5-35B-A3B, in arrays of `_rule_features` in float32: what the
# rule reads and writes in a forward pass, the backward pass in proportion to it, and what exists at
# one time in a backward pass.
RULE_MOVES = 12.5
RULE_BACKWARD = 2.5
RULE_ARRAYS = 2.2
# Fitted to a compiled plan of Gemma 4 31B: levels, pairs of them and blocks are float32 arrays.
NF4_MOVES = 20.0


def rule_seconds(d: DecoderConfig, flops_per_s: float, bytes_per_s: float) -> float:
    """Time of gated DeltaNet's chunks in all layers: of their traffic, or of their products.

    The products of a token with its chunk: keys with keys and with queries; of each value head, the
    pairs with values, keys and corrected values, and the state with keys, values and queries.
    """
    flops = sum(
        2 * m.N * (CHUNK * (2 * m.V + m.D) + 3 * m.D * m.V) + 2 * m.K * 2 * CHUNK * m.D
        for m in d.delta_layers
    )
    return max(flops / flops_per_s, 4 * RULE_MOVES * _rule_features(d) / bytes_per_s)


def rule_work_bytes(d: DecoderConfig, n_tokens: int | float, tensor: int) -> float:
    """Arrays of gated DeltaNet in the backward pass of a layer, of the heads computed together."""
    if not d.delta_layers:
        return 0.0
    heads = max(m.N for m in d.delta_layers)
    together = min(n_tokens * heads / tensor, MAX_WORK)
    return 4 * RULE_ARRAYS * together * _rule_features(d) / sum(m.N for m in d.delta_layers)


def kept_rule_features(d: DecoderConfig) -> int:
    """Features of the rule's outputs in all layers, which backward keeps as those of attention."""
    return sum(m.N * m.V for m in d.delta_layers)


@functools.cache
def copied_features(d: DecoderConfig, expert: int, tensor: int) -> float:
    """Features of all layers that are read and written for a token's copies, one per expert.

    Copies are written in the order of the experts and read in the order of tokens; the activation
    reads two arrays and writes one. With expert parallelism there is room for more copies.
    """
    copies = min(expert, ROOM)
    features = (ffn.top_k * (2 * d.D + 3 * ffn.F / tensor) for ffn in d.expert_layers)
    return copies * sum(features, 0.0)


def expanded_bytes(d: DecoderConfig, platform: str) -> float:
    """Bytes per parameter that a TPU moves to dequantize nf4 for a product; else 0."""
    return NF4_MOVES if d.base_dtype == "nf4" and platform == "tpu" else 0.0


def _rule_features(d: DecoderConfig) -> float:
    """Values, keys, pairs of a chunk, and a token's share of the state at the start of its chunk,
    of all value heads and layers."""
    return sum((m.N * (m.V + m.D + CHUNK + m.D * m.V / CHUNK) for m in d.delta_layers), 0.0)
