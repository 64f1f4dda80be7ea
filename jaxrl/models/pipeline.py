"""Layers in stages, one a device, and rows that pass through them one after another.

GPipe, https://arxiv.org/abs/1811.06965: with S stages and M micro-batches there are M + S - 1 ticks. At tick t, stage
s works on micro-batch t - s and hands its outcome to stage s + 1. The first S - 1 ticks fill the pipeline and the last
empty it: a stage then works on something that nobody uses. Backward goes the same way in reverse.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxrl.types import Tree
from sharding import Rules


def run_stages(
    stage: Callable[..., jax.Array],
    layers: Tree,
    x: Float[Array, "B T D"],
    rows: Tree,
    *,
    rules: Rules,
) -> Float[Array, "B T D"]:
    """The outcome of all layers. A micro-batch is one row of every data-parallel rank.

    `layers` have their leading axis cut over the stages, and `stage(layers, x, *rows)` runs those of one of them. `rows`
    are further inputs, [B, T]. `x` comes and goes as the rules lay the residual stream out; inside, every stage sees
    whole rows.
    """
    inside = rules.in_stage()
    (axis,) = rules.mesh_axes("layers")
    micro = _split(x, inside), jax.tree.map(lambda a: _split(a, inside), rows)
    pipeline = jax.shard_map(
        lambda layers, micro: _ticks(stage, layers, *micro, axis=axis),
        in_specs=(jax.P(axis), jax.P()),
        out_specs=jax.P(axis),
        axis_names={axis},
        check_vma=False,
    )
    layers = jax.tree.map(lambda a: _cut(a, axis), layers)
    out = jnp.sum(pipeline(layers, micro), axis=0)  # zeros but for the last stage
    return jax.reshard(_join(out, inside), rules.spec("batch", "time", "embed"))


def _ticks(stage: Callable, layers: Tree, x, rows: Tree, *, axis: str):
    """This stage's outcome of all micro-batches, [1, M, ranks, T, D]; zeros but in the last stage."""
    n_stages, me, n_micro = lax.axis_size(axis), lax.axis_index(axis), x.shape[0]
    to_next = [(i, (i + 1) % n_stages) for i in range(n_stages)]

    def tick(arrived, t):
        mine = jnp.clip(t - me, 0, n_micro - 1)
        here = jnp.where(me == 0, x[mine], arrived)
        done = stage(layers, here, *(a[mine] for a in rows))
        return lax.ppermute(done, axis, to_next), done

    _, done = lax.scan(tick, jnp.zeros_like(x[0]), jnp.arange(n_micro + n_stages - 1))
    done = done[n_stages - 1 :]
    return jnp.where(me == n_stages - 1, done, jnp.zeros_like(done))[None]


def _split(a: jax.Array, rules: Rules) -> jax.Array:
    """[B, T, ...] -> [M, ranks, T, ...]; rows of a rank lie side by side."""
    ranks, rest = rules.n_shards("batch"), (None,) * (a.ndim - 2)
    a = jax.reshard(a, rules.spec("batch", "time", *rest))
    out = rules.spec("batch", None, "time", *rest)
    return jnp.reshape(a, (ranks, -1, *a.shape[1:]), out_sharding=out).swapaxes(0, 1)


def _join(a: jax.Array, rules: Rules) -> jax.Array:
    """The inverse of `_split`."""
    rest = (None,) * (a.ndim - 3)
    out = rules.spec("batch", "time", *rest)
    return jnp.reshape(a.swapaxes(0, 1), (-1, *a.shape[2:]), out_sharding=out)


def _cut(a: jax.Array, axis: str) -> jax.Array:
    return jax.reshard(a, jax.P(axis, *jax.typeof(a).sharding.spec[1:]))
