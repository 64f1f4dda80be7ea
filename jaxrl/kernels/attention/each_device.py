"""Attention of whole rows as a shard_map: each device takes its rows and its heads."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from sharding import Rules


def on_each_device(
    attend: Callable[..., jax.Array],
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    *,
    segments: Int[Array, "B T"],
    window: int | Int[Array, ""],
    rules: Rules,
) -> Float[Array, "B T N H"]:
    """`attend(q, k, v, segments, window)` of what lies on one device; nothing is exchanged between them."""
    heads, kv_heads = (rules.spec("batch", None, h, None) for h in ("heads", "kv_heads"))
    rows = rules.spec("batch", None)
    local = jax.shard_map(
        attend,
        in_specs=(heads, kv_heads, kv_heads, rows, jax.P()),
        out_specs=heads,
        check_vma=False,
    )
    q, k, v = jax.reshard(q, heads), jax.reshard(k, kv_heads), jax.reshard(v, kv_heads)
    window = jnp.asarray(window, jnp.int32)
    out = local(q, k, v, jax.reshard(segments, rows), jax.reshard(window, jax.P()))
    return jax.reshard(out, rules.spec("batch", "time", "heads", None))
