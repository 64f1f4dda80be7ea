"""Floating-point operations of a decoder on given sequences, as model FLOPs utilisation counts them."""

import numpy as np
from jaxtyping import Int

from jaxrl.models.config import DecoderConfig


def forward_flops(cfg: DecoderConfig, lens: Int[np.ndarray, "S"]) -> float:
    """Of one forward pass over sequences of `lens` tokens, what its heads say of every token included.

    A multiplication and an addition for each weight that a token meets (of a mixture of experts those of its
    own experts), and for each of the keys that it sees; norms, rotations and padding count nothing (PaLM,
    appendix B, https://arxiv.org/abs/2204.02311, with causal attention counted as half). Training takes
    three times as much: recomputation is no useful work.
    """
    n = np.asarray(lens, np.float64)
    attention = cfg.D * cfg.H * (2 * cfg.N + 2 * cfg.K)
    mlp = 3 * cfg.D * cfg.F_expert * cfg.top_k + cfg.D * cfg.E if cfg.E else 3 * cfg.D * cfg.F
    heads = sum({"vocab": cfg.V, "score": 1}[head] for head in cfg.heads) * cfg.D
    weights = cfg.L * (attention + mlp) + heads
    keys = sum(_keys_seen(n, cfg.window(layer)).sum() for layer in range(cfg.L))
    return float(2 * weights * n.sum() + 4 * cfg.N * cfg.H * keys)


def _keys_seen(n: np.ndarray, window: int) -> np.ndarray:
    """Pairs of a token and a key that it sees, per sequence; window 0 = all earlier ones."""
    seen = np.minimum(n, window) if window else n
    return seen * (seen + 1) / 2 + (n - seen) * seen
