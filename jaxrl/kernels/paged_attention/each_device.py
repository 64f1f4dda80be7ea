"""Attention over pages as a shard_map: each device takes its rows, and its heads of the pages."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl.kernels.paged_attention.pages import Pages
from sharding import Rules


def on_each_device(
    attend: Callable[..., jax.Array],
    q: Float[Array, "B T N H"],
    k_pages: Pages,
    v_pages: Pages,
    page_table: Int[Array, "B C"],
    positions: Int[Array, "B T"],
    *,
    window: int | Int[Array, ""],
    rules: Rules,
) -> Float[Array, "B T N H"]:
    """`attend(q, k_pages, v_pages, page_table, positions, window)` of what lies on one device."""
    heads, rows = rules.spec("batch", None, "heads", None), rules.spec("batch", None)
    pool = rules.spec(None, "kv_heads")
    local = jax.shard_map(
        attend,
        in_specs=(heads, pool, pool, rows, rows, jax.P()),
        out_specs=heads,
        check_vma=False,
    )
    q, window = jax.reshard(q, heads), jax.reshard(jnp.asarray(window, jnp.int32), jax.P())
    table, positions = jax.reshard(page_table, rows), jax.reshard(positions, rows)
    k_pages, v_pages = jax.reshard(k_pages, pool), jax.reshard(v_pages, pool)
    out = local(q, k_pages, v_pages, table, positions, window)
    return jax.reshard(out, rules.spec("batch", "time", "heads", None))
