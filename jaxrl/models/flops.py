"""Floating-point operations of a decoder, as model FLOPs utilization (MFU) counts them."""

import numpy as np
from jaxtyping import Int

from jaxrl.models.config import DecoderConfig


def forward_flops(cfg: DecoderConfig, lens: Int[np.ndarray, "S"]) -> float:
    """FLOPs of one forward pass over sequences of `lens` tokens, heads included.

    Counts one multiplication and one addition per weight and token (in a mixture of experts, the
    weights of the token's own experts) and per visible key. Norms, rotations and padding count
    nothing (PaLM, appendix B, https://arxiv.org/abs/2204.02311, with causal attention counted as
    half). Training takes three times as much: recomputation is not useful work.
    """
    n = np.asarray(lens, np.float64)
    attention = cfg.D * cfg.H * (2 * cfg.N + 2 * cfg.K)
    mlp = 3 * cfg.D * cfg.F_expert * cfg.top_k + cfg.D * cfg.E if cfg.E else 3 * cfg.D * cfg.F
    heads = sum({"vocab": cfg.V, "score": 1}[head] for head in cfg.heads) * cfg.D
    weights = cfg.L * (attention + mlp) + heads
    keys = sum(_visible_keys(n, cfg.window(layer)).sum() for layer in range(cfg.L))
    return float(2 * weights * n.sum() + 4 * cfg.N * cfg.H * keys)


def _visible_keys(n: np.ndarray, window: int) -> np.ndarray:
    """(token, visible key) pairs per sequence; window 0 means all earlier keys."""
    visible = np.minimum(n, window) if window else n
    return visible * (visible + 1) / 2 + (n - visible) * visible
