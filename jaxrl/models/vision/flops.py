"""Floating-point operations and activations of a vision tower, for plans."""

from collections.abc import Sequence

import numpy as np

from jaxrl.models.vision.config import TowerConfig
from jaxrl.models.vision.patches import Grid, image_layout


def tower_flops(cfg: TowerConfig, grids: Sequence[Grid]) -> float:
    """FLOPs of one forward pass over images of these grids, as `forward_flops` counts a decoder's.

    One multiplication and one addition per weight and patch, or token in the projector, and per
    pair of patches that see each other; norms, rotations, positions and padding count nothing.
    """
    n_patches = sum(int(np.prod(grid)) for grid in grids)
    heads = cfg.attn.N * cfg.attn.H
    block = 4 * cfg.D * heads + cfg.ffn.n_matrices * cfg.D * cfg.ffn.F
    weights = n_patches * (cfg.D * cfg.patch_features + cfg.L * block)
    weights += n_patches // cfg.merge**2 * _projector_weights(cfg) * (1 + len(cfg.deepstack))
    full = sum(map(cfg.sees_image, range(cfg.L)))
    pairs = 0
    for grid in grids:
        layout = image_layout(cfg, grid)
        pairs += full * _pairs(layout.frames) + (cfg.L - full) * _pairs(layout.windows)
    return float(2 * weights + 4 * heads * pairs)


def _projector_weights(cfg: TowerConfig) -> int:
    if cfg.merger.kind == "mean":
        return cfg.D * cfg.out_D
    return cfg.merged_D * (cfg.merged_D + cfg.out_D)


def _pairs(segments: np.ndarray) -> int:
    """(query, key) pairs within segments."""
    return int((np.bincount(segments) ** 2).sum())


def tower_activation_bytes(cfg: TowerConfig, n_patches: int, itemsize: int, remat: str) -> int:
    """Bytes that the backward pass of a tower keeps of a row of patches, on one device.

    With remat "full", the input of each block; with "none" also what its products and norms read:
    the normed inputs, queries, keys, values and output of attention, the inputs of both norms and
    the MLP's features before and after the activation. The projector and the embedding of patches
    keep their inputs in any case.
    """
    wide = (cfg.ffn.n_matrices - 1) * cfg.ffn.F + cfg.ffn.F
    block = {"full": cfg.D, "none": cfg.D * 8 + wide}[remat]
    projector = cfg.D * (2 + (cfg.merger.kind == "mlp")) * (1 + len(cfg.deepstack))
    return n_patches * itemsize * (cfg.patch_features + cfg.L * block + projector)
