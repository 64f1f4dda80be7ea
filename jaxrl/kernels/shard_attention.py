"""Attention as a shard_map: each device computes its rows and heads, without communication."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl.kernels.quantized import Quantized
from jaxrl.kernels.visibility import Visibility
from sharding import Rules


def shard_attention(
    attend: Callable[..., jax.Array],
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    *,
    segments: Int[Array, "B T"],
    window: int | Int[Array, ""],
    visibility: Visibility | None,
    sinks: Float[Array, "N"] | None,
    rules: Rules,
) -> Float[Array, "B T N H"]:
    """`attend(q, k, v, segments, window, visibility, sinks)` on each device's shard of rows."""
    heads, kv_heads = (rules.spec("batch", None, h, None) for h in ("heads", "kv_heads"))
    rows = rules.spec("batch", None)
    local = jax.shard_map(
        attend,
        in_specs=(heads, kv_heads, kv_heads, rows, jax.P(), rows, rules.spec("heads")),
        out_specs=heads,
        check_vma=False,
    )
    q, k, v = jax.reshard(q, heads), jax.reshard(k, kv_heads), jax.reshard(v, kv_heads)
    window = jax.reshard(jnp.asarray(window, jnp.int32), jax.P())
    segments, visibility = jax.tree.map(lambda a: jax.reshard(a, rows), (segments, visibility))
    out = local(q, k, v, segments, window, visibility, shard_sinks(sinks, rules))
    return jax.reshard(out, rules.spec("batch", "time", "heads", None))


def shard_sinks(sinks: Float[Array, "N"] | None, rules: Rules) -> Float[Array, "N"] | None:
    """The sinks in float32, sharded as the query heads are."""
    return None if sinks is None else jax.reshard(sinks.astype(jnp.float32), rules.spec("heads"))


def shard_paged_attention(
    attend: Callable[..., jax.Array],
    q: Float[Array, "B T N H"],
    k_pages: jax.Array | Quantized,
    v_pages: jax.Array | Quantized | None,
    page_table: Int[Array, "B C"],
    positions: Int[Array, "B T"],
    ahead: Int[Array, "B T"] | None,
    *,
    window: int | Int[Array, ""],
    sinks: Float[Array, "N"] | None,
    rules: Rules,
) -> Float[Array, "B T N H"]:
    """`attend(q, k_pages, v_pages, page_table, positions, ahead, window, sinks)` on each shard."""
    heads, rows = rules.spec("batch", None, "heads", None), rules.spec("batch", None)
    pool = rules.spec(None, "kv_heads")
    in_specs = heads, pool, pool, rows, rows, rows, jax.P(), rules.spec("heads")
    local = jax.shard_map(attend, in_specs=in_specs, out_specs=heads, check_vma=False)
    q, window = jax.reshard(q, heads), jax.reshard(jnp.asarray(window, jnp.int32), jax.P())
    table, positions = jax.reshard(page_table, rows), jax.reshard(positions, rows)
    ahead = None if ahead is None else jax.reshard(ahead, rows)
    k_pages, v_pages = jax.reshard(k_pages, pool), jax.reshard(v_pages, pool)
    out = local(q, k_pages, v_pages, table, positions, ahead, window, shard_sinks(sinks, rules))
    return jax.reshard(out, rules.spec("batch", "time", "heads", None))
