"""Whether a model fits a mesh, found out without devices."""

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding
from jax.typing import DTypeLike

from jaxrl.models.config import DecoderConfig
from jaxrl.models.decoder import Decoder, decoder_specs, forward_packed
from jaxrl.models.spec import abstract_params, is_spec
from sharding import TRAIN, Rules

SIZES = {
    "layers": "layers",
    "heads": "query heads",
    "kv_heads": "kv heads",
    "ffw": "feed-forward features",
    "vocab": "vocabulary entries",
    "experts": "experts",
    "w_embed": "model features",
}


def check_mesh(cfg: DecoderConfig, mesh_sizes: Mapping[str, int], rules: Rules = TRAIN) -> None:
    """Raises one ValueError that lists every dimension of `cfg` that the mesh axes do not divide."""
    mistakes = set()
    sharing = rules.mesh_axes("attn_heads")
    if cfg.N % math.prod(mesh_sizes.get(axis, 1) for axis in sharing):
        shown = " x ".join(f"{axis}={mesh_sizes.get(axis, 1)}" for axis in sharing)
        mistakes.add(
            f"{cfg.N} query heads over {shown} in attention (not with learner.sequence_parallel='ring')"
        )
    if not cfg.E and (n := _devices(rules.experts, mesh_sizes)) > 1:
        mistakes.add(f"no experts to share over {rules.experts}={n}")
    if cfg.E and (n := _devices(rules.layers, mesh_sizes)) > 1:
        mistakes.add(f"experts in {rules.layers}={n} stages of layers, which are not built yet")
    for spec in jax.tree.leaves(decoder_specs(cfg), is_leaf=is_spec):
        for size, logical, axis in zip(spec.shape, spec.axes, rules.spec(*spec.axes), strict=True):
            axes = (axis,) if isinstance(axis, str) else axis or ()
            if size % _devices(axis, mesh_sizes):
                shown = " x ".join(f"{a}={mesh_sizes[a]}" for a in axes)
                mistakes.add(f"{size} {SIZES[logical]} over {shown}")
    if mistakes:
        raise ValueError(
            f"the mesh does not divide this {cfg.family} model evenly: {'; '.join(sorted(mistakes))}. "
            f"Set config.mesh sizes that divide these numbers"
        )


def _devices(axis: str | tuple[str, ...] | None, mesh_sizes: Mapping[str, int]) -> int:
    """Devices along the mesh axes of a rule."""
    axes = (axis,) if isinstance(axis, str) else axis or ()
    return math.prod(mesh_sizes.get(a, 1) for a in axes)


def abstract_forward(
    cfg: DecoderConfig,
    mesh: AbstractMesh,
    *,
    rules: Rules = TRAIN,
    dtype: DTypeLike = jnp.bfloat16,
    rows: int | None = None,
    row_len: int = 128,
) -> tuple[jax.ShapeDtypeStruct, Decoder]:
    """Types of the logits [rows, row_len, V] and of the gradient of their sum, on a mesh of no devices.

    Explicit shardings are part of the types, so a model whose shardings do not fit together fails
    here, on any machine, in seconds. `rows` None is one row per data-parallel rank.
    """
    check_mesh(cfg, mesh.shape, rules)
    batch_axes = rules.batch if isinstance(rules.batch, tuple) else (rules.batch,)
    n_ranks = math.prod(mesh.shape[axis] for axis in batch_axes if axis is not None)
    with jax.sharding.use_abstract_mesh(mesh):
        params = abstract_params(decoder_specs(cfg), rules, dtype)
        shape, sharding = (
            (rows or n_ranks, row_len),
            NamedSharding(mesh, rules.spec("batch", "time")),
        )
        tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)

        def logits(params: Decoder, tokens: jax.Array) -> jax.Array:
            hidden = forward_packed(
                params, tokens, jnp.ones_like(tokens), tokens, rules=rules, remat="full"
            )
            return params.logits(hidden, rules)

        def total(params: Decoder, tokens: jax.Array) -> jax.Array:
            return logits(params, tokens).sum()

        out = jax.eval_shape(logits, params, tokens)
        return out, jax.eval_shape(jax.grad(total), params, tokens)
