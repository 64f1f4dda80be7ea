"""Whether a model fits a mesh: every sharded dimension must divide evenly."""

import math
from collections.abc import Mapping

import jax

from jaxrl.models.config import DecoderConfig
from jaxrl.models.decoder import decoder_specs
from jaxrl.models.spec import is_spec
from sharding import TRAIN, Rules

SIZES = {
    "heads": "query heads",
    "kv_heads": "kv heads",
    "ffw": "feed-forward features",
    "vocab": "vocabulary entries",
    "w_embed": "model features",
}


def check_mesh(cfg: DecoderConfig, mesh_sizes: Mapping[str, int], rules: Rules = TRAIN) -> None:
    """Raises one ValueError that lists every dimension of `cfg` that the mesh axes do not divide."""
    mistakes = set()
    for spec in jax.tree.leaves(decoder_specs(cfg), is_leaf=is_spec):
        for size, logical, axis in zip(spec.shape, spec.axes, rules.spec(*spec.axes), strict=True):
            axes = (axis,) if isinstance(axis, str) else axis or ()
            if size % math.prod(mesh_sizes.get(a, 1) for a in axes):
                shown = " x ".join(f"{a}={mesh_sizes[a]}" for a in axes)
                mistakes.add(f"{size} {SIZES[logical]} over {shown}")
    if mistakes:
        raise ValueError(
            f"the mesh does not divide this {cfg.family} model evenly: {'; '.join(sorted(mistakes))}. "
            f"Set config.mesh sizes that divide these numbers"
        )
