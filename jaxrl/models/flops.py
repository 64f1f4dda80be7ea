"""Floating-point operations of a decoder, as model FLOPs utilization (MFU) counts them."""

import functools

import numpy as np
from jaxtyping import Int

from jaxrl.models.config import AttentionConfig, DecoderConfig, MLAConfig


def forward_flops(cfg: DecoderConfig, lens: Int[np.ndarray, "S"]) -> float:
    """FLOPs of one forward pass over sequences of `lens` tokens, heads included.

    Counts one multiplication and one addition per weight and token (in a mixture of experts, the
    weights of the token's own experts and of a shared one) and per visible key; a state of gated
    DeltaNet is read twice and written once per token, and a short convolution has its taps. Norms,
    rotations and padding count nothing (PaLM, appendix B, https://arxiv.org/abs/2204.02311, with
    causal attention counted as half), and latent attention is counted in its expanded form.
    Training takes three times as much: recomputation is not useful work.
    """
    n = np.asarray(lens, np.float64)
    weights = sum({"vocab": cfg.V, "score": len(cfg.labels)}[head] for head in cfg.heads) * cfg.D
    products = 0.0  # between tokens
    for layer in cfg.layers:
        mixer, ffn = layer.mixer, layer.ffn
        weights += cfg.D * (
            mixer.weight_rows + ffn.n_matrices * ffn.active_features + ffn.gate_rows
        )
        weights += cfg.D * 3 * cfg.input_P  # the inputs of the layer, their gate and projection
        if isinstance(mixer, AttentionConfig):
            products += 4 * mixer.N * mixer.H * _visible_keys(n, mixer.window).sum()
        elif isinstance(mixer, MLAConfig):
            weights += mixer.rank_weights
            products += 2 * mixer.N * (mixer.H + mixer.V) * _visible_keys(n, mixer.window).sum()
        else:
            products += 2 * mixer.token_products * n.sum()
    return float(2 * weights * n.sum() + products)


@functools.cache
def score_features(cfg: DecoderConfig) -> int:
    """Features of all layers' queries: a (query, key) pair has two products of so many."""
    return sum(
        mixer.N * (max(mixer.H, mixer.V) if isinstance(mixer, MLAConfig) else mixer.H)
        for mixer in cfg.paged_layers
    )


def _visible_keys(n: np.ndarray, window: int) -> np.ndarray:
    """(token, visible key) pairs per sequence; window 0 means all earlier keys."""
    visible = np.minimum(n, window) if window else n
    return visible * (visible + 1) / 2 + (n - visible) * visible
