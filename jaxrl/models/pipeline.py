"""Pipeline parallelism: layers in stages, one per device, and micro-batches that pass through them.

GPipe, https://arxiv.org/abs/1811.06965: S stages and M micro-batches take M + S - 1 ticks. At tick
t, stage s processes micro-batch t - s and sends its result to stage s + 1. The first S - 1 ticks
fill the pipeline and the last S - 1 drain it; meanwhile the idle stages compute on values that are
discarded. The backward pass runs the same schedule in reverse.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxrl.types import Tree
from sharding import Rules


def run_stages(
    stage: Callable[..., tuple[jax.Array, Tree]],
    layers: Tree,
    x: Float[Array, "B T D"],
    rows: Tree,
    *,
    rules: Rules,
) -> tuple[Float[Array, "B T D"], Tree]:
    """(output of all layers, sums per layer). A micro-batch is one row of every data-parallel rank.

    The leading axis of `layers` is sharded over the stages; `stage(layers, x, *rows)` runs the
    layers of one stage and returns their output and sums over tokens, [layers, ...]. `rows` are
    further inputs, [B, T]. `x` has the sharding of the residual stream; inside, no row is shared
    between stages.
    """
    (axis,) = rules.mesh_axes("layers")
    pipeline = jax.shard_map(
        lambda layers, x, rows: _ticks(stage, layers, x, rows, axis=axis),
        in_specs=jax.P(axis),
        out_specs=jax.P(axis),
        axis_names={axis},
        check_vma=False,
    )
    layers = jax.tree.map(lambda a: shard_over_stages(a, axis), layers)
    x, rows = jax.tree.map(lambda a: to_stages(to_micro_batches(a, rules), rules), (x, rows))
    residual = jax.P(axis, None, *rules.in_stage().residual_spec(x.shape[2:]))
    x, whole = jax.reshard(x, residual), jax.typeof(x).sharding.spec
    x, sums = pipeline(layers, x, rows)
    x = from_stages(jax.reshard(x, whole), rules)
    return from_micro_batches(x, rules), sums


def to_stages(a: jax.Array, rules: Rules) -> jax.Array:
    """[M, ranks, T, ...] with T sharded over stages -> [S, M, ranks, T, ...], not over stages."""
    (axis,) = rules.mesh_axes("layers")
    shared, whole = _specs(rules, a.ndim - 3)

    def gather(a: jax.Array) -> jax.Array:
        return lax.all_gather(a, axis, axis=2, tiled=True)[None]

    return jax.shard_map(gather, in_specs=shared, out_specs=whole)(a)


def from_stages(a: jax.Array, rules: Rules) -> jax.Array:
    """The transpose of `to_stages`: a reduce-scatter over the stages along T."""
    (axis,) = rules.mesh_axes("layers")
    shared, whole = _specs(rules, a.ndim - 4)

    def scatter(a: jax.Array) -> jax.Array:
        return lax.psum_scatter(a[0], axis, scatter_dimension=2, tiled=True)

    return jax.shard_map(scatter, in_specs=whole, out_specs=shared)(a)


def _specs(rules: Rules, n_more: int) -> tuple[jax.P, jax.P]:
    """PartitionSpecs of [M, ranks, T, ...] outside and [S, M, ranks, T, ...] inside the stages."""
    rest = (None,) * n_more
    shared = rules.spec(None, "batch", "time", *rest)
    inside = rules.in_stage().spec("time")
    return shared, jax.P(*rules.spec("layers", None, "batch"), *inside, *rest)


def _ticks(stage: Callable, layers: Tree, x, rows: Tree, *, axis: str):
    """(this stage's outputs, [1, M, ranks, T, D], zeros except in the last stage; its sums)."""
    x, rows = x[0], jax.tree.map(lambda a: a[0], rows)
    n_stages, stage_index, n_micro = lax.axis_size(axis), lax.axis_index(axis), x.shape[0]
    to_next = [(i, (i + 1) % n_stages) for i in range(n_stages)]

    def tick(received, t):
        index = jnp.clip(t - stage_index, 0, n_micro - 1)
        inputs = jnp.where(stage_index == 0, x[index], received)
        done, sums = stage(layers, inputs, *jax.tree.map(lambda a: a[index], rows))
        busy = index == t - stage_index
        sums = jax.tree.map(lambda a: jnp.where(busy, a, 0), sums)
        return lax.ppermute(done, axis, to_next), (done, sums)

    ticks = jnp.arange(n_micro + n_stages - 1)
    _, (done, sums) = lax.scan(tick, jnp.zeros_like(x[0]), ticks)
    done = done[n_stages - 1 :]
    done = jnp.where(stage_index == n_stages - 1, done, jnp.zeros_like(done))[None]
    return done, jax.tree.map(lambda a: jnp.sum(a, axis=0), sums)


def to_micro_batches(a: jax.Array, rules: Rules) -> jax.Array:
    """[B, T, ...] -> [M, ranks, T, ...]; the rows of a rank are adjacent in B."""
    ranks, rest = rules.n_shards("batch"), (None,) * (a.ndim - 2)
    a = jax.reshard(a, rules.spec("batch", "time", *rest))
    out = rules.spec("batch", None, "time", *rest)
    return jnp.reshape(a, (ranks, -1, *a.shape[1:]), out_sharding=out).swapaxes(0, 1)


def from_micro_batches(a: jax.Array, rules: Rules) -> jax.Array:
    """The inverse of `to_micro_batches`."""
    rest = (None,) * (a.ndim - 3)
    out = rules.spec("batch", "time", *rest)
    return jnp.reshape(a.swapaxes(0, 1), (-1, *a.shape[2:]), out_sharding=out)


def shard_over_stages(a: jax.Array, axis: str) -> jax.Array:
    return jax.reshard(a, jax.P(axis, *jax.typeof(a).sharding.spec[1:]))
