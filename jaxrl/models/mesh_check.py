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


def check_mesh(
    cfg: DecoderConfig,
    mesh_sizes: Mapping[str, int],
    rules: Rules = TRAIN,
    *,
    keys: str = "config.mesh sizes",
) -> None:
    """Raises one ValueError that lists every dimension of `cfg` that the mesh axes do not divide, and the
    `keys` to set."""
    mistakes = set()

    def cut(logical: str) -> tuple[int, str]:
        """Devices over which a logical axis is cut, and the mesh sizes that make them."""
        sizes = {axis: mesh_sizes.get(axis, 1) for axis in rules.mesh_axes(logical)}
        shown = " x ".join(f"{axis}={size}" for axis, size in sizes.items())
        return math.prod(sizes.values()), shown

    n, shown = cut("attn_heads")
    if cfg.N % n:
        mistakes.add(
            f"{cfg.N} query heads over {shown} in attention (not with learner.sequence_parallel='ring')"
        )
    n, shown = cut("experts")
    if n > 1 and not cfg.E:
        mistakes.add(f"no experts to share over {shown}")
    n, shown = cut("layers")
    if n > 1 and cfg.E:
        mistakes.add(f"experts in {shown} stages of layers, which are not built yet")
    for spec in jax.tree.leaves(decoder_specs(cfg), is_leaf=is_spec):
        for size, logical in zip(spec.shape, spec.axes, strict=True):
            n, shown = cut(logical) if logical else (1, "")
            if size % n:
                mistakes.add(f"{size} {SIZES[logical]} over {shown}")
    if mistakes:
        raise ValueError(
            f"the mesh does not divide this {cfg.family} model evenly: {'; '.join(sorted(mistakes))}. "
            f"Set {keys} that divide these numbers"
        )


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
    with jax.sharding.use_abstract_mesh(mesh):
        params = abstract_params(decoder_specs(cfg), rules, dtype)
        tokens = jax.ShapeDtypeStruct(
            (rows or rules.n_shards("batch"), row_len),
            jnp.int32,
            sharding=NamedSharding(mesh, rules.spec("batch", "time")),
        )

        def logits(params: Decoder, tokens: jax.Array) -> jax.Array:
            hidden = forward_packed(
                params, tokens, jnp.ones_like(tokens), tokens, rules=rules, remat="full"
            )
            return params.logits(hidden, rules)

        def total(params: Decoder, tokens: jax.Array) -> jax.Array:
            return logits(params, tokens).sum()

        out = jax.eval_shape(logits, params, tokens)
        return out, jax.eval_shape(jax.grad(total), params, tokens)
