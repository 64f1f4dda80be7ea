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
    (axis,) = rules.mesh_axes("layers")
    pipeline = jax.shard_map(
        lambda layers, x, rows: _ticks(stage, layers, x, rows, axis=axis),
        in_specs=jax.P(axis),
        out_specs=jax.P(axis),
        axis_names={axis},
        check_vma=False,
    )
    layers = jax.tree.map(lambda a: _cut(a, axis), layers)
    x, rows = jax.tree.map(lambda a: _to_stages(_split(a, rules), rules), (x, rows))
    return _join(_from_stages(pipeline(layers, x, rows), rules), rules)


def _to_stages(a: jax.Array, rules: Rules) -> jax.Array:
    """[M, ranks, T, ...], of which the stages share T, -> [S, M, ranks, T, ...]: whole rows for each."""
    (axis,) = rules.mesh_axes("layers")
    shared, whole = _specs(rules, a.ndim - 3)

    def gather(a: jax.Array) -> jax.Array:
        return lax.all_gather(a, axis, axis=2, tiled=True)[None]

    return jax.shard_map(gather, in_specs=shared, out_specs=whole)(a)


def _from_stages(a: jax.Array, rules: Rules) -> jax.Array:
    """The transpose of `_to_stages`: the sum over the stages, of which each gets its part of T."""
    (axis,) = rules.mesh_axes("layers")
    shared, whole = _specs(rules, a.ndim - 4)

    def scatter(a: jax.Array) -> jax.Array:
        return lax.psum_scatter(a[0], axis, scatter_dimension=2, tiled=True)

    return jax.shard_map(scatter, in_specs=whole, out_specs=shared)(a)


def _specs(rules: Rules, n_more: int) -> tuple[jax.P, jax.P]:
    """Of [M, ranks, T, ...] outside the stages, and of [S, M, ranks, T, ...] inside."""
    rest = (None,) * n_more
    shared = rules.spec(None, "batch", "time", *rest)
    return shared, rules.spec("layers", None, "batch", None, *rest)


def _ticks(stage: Callable, layers: Tree, x, rows: Tree, *, axis: str):
    """This stage's outcome of all micro-batches, [1, M, ranks, T, D]; zeros but in the last stage."""
    x, rows = x[0], jax.tree.map(lambda a: a[0], rows)
    n_stages, me, n_micro = lax.axis_size(axis), lax.axis_index(axis), x.shape[0]
    to_next = [(i, (i + 1) % n_stages) for i in range(n_stages)]

    def tick(arrived, t):
        mine = jnp.clip(t - me, 0, n_micro - 1)
        here = jnp.where(me == 0, x[mine], arrived)
        # Without it the weights of all layers of a stage would be gathered at once, ahead of the ticks.
        own, here = lax.optimization_barrier((layers, here))
        done = stage(own, here, *(a[mine] for a in rows))
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
