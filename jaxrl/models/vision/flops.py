"""Floating-point operations and activations of a vision tower, for plans."""

from collections.abc import Sequence

import numpy as np

from jaxrl.models.vision.config import TowerConfig
from jaxrl.models.vision.patches import image_layout
from jaxrl.types import Grid


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


def tower_activation_bytes(cfg: TowerConfig, n_patches: int, itemsize: int) -> int:
    """Bytes that the backward pass keeps of a row of patches with remat "full", on one device.

    These are the patches, the input of each block, and what the last norm and the projectors keep,
    which are not recomputed: the norm two arrays of D, an MLP seven, the mean of patches two per
    token, and one more each if it is standardized and if its norm has weights. All count
    `itemsize`, also those in float32.
    """
    mlps = 7 * (cfg.merger.kind == "mlp") * (1 + len(cfg.deepstack))
    n_means = 2 + (cfg.merger.standard is not None) + (cfg.merger.norm_name is not None)
    means = n_means * (cfg.merger.kind == "mean") / cfg.merge**2
    final_norm = 2 * (cfg.names.final_norm is not None)
    per_patch = cfg.patch_features + cfg.D * (cfg.L + mlps + means + final_norm)
    return int(n_patches * itemsize * per_patch)
