"""Values of new adapters that depend on the weights: DoRA's magnitudes, PiSSA's principal parts."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxrl.models.layers.linear import Adapter, Linear
from jaxrl.models.layers.moe import AXES, MoE
from jaxrl.models.layers.stored import QUANTIZED, Axes, Stored, dense, gather_stored
from sharding import Rules

ITERATIONS, OVERSAMPLING = 8, 8  # of the subspace iteration


def with_magnitudes[Model: nnx.Module](model: Model, rules: Rules) -> Model:
    """The model with the norm of each output's weights as the magnitude of its adapter."""

    def change(w: Stored, adapter: Adapter) -> None:
        adapter.m = nnx.data(_norms(w, adapter.m))

    return _map_adapters(change, model, rules)


def with_start[Model: nnx.Module](model: Model, rules: Rules) -> Model:
    """The model whose adapters start at the principal part of their weights (PiSSA)."""

    def change(w: Stored, adapter: Adapter) -> None:
        parts = _start(w, adapter.a, adapter.b, scale=adapter.scale, n_out=adapter.n_out)
        adapter.a0, adapter.b0 = map(nnx.data, parts)
        # In separate buffers: updates donate A and B.
        adapter.a, adapter.b = (nnx.data(jnp.copy(part)) for part in parts)

    return _map_adapters(change, model, rules)


def principal(w: Float[Array, "O I"], rank: int) -> tuple[Float[Array, "R I"], Float[Array, "O R"]]:
    """(A, B) with B A the best approximation of w of this rank: sqrt(S) Vᵀ and U sqrt(S).

    PiSSA, equations 2 and 3. The singular values and vectors are those of subspace iteration from a
    fixed random matrix (https://arxiv.org/abs/0909.4061, algorithms 4.4 and 5.1), which is exact
    where `rank` + 8 is at least a side of w.
    """
    k = min(rank + OVERSAMPLING, *w.shape)
    q = jax.random.normal(jax.random.key(0), (w.shape[1], k))
    q = jax.lax.fori_loop(
        0, ITERATIONS, lambda _, q: jnp.linalg.qr(w.T @ jnp.linalg.qr(w @ q)[0])[0], q
    )
    u, s, vt = jnp.linalg.svd(w @ q, full_matrices=False)
    root = jnp.sqrt(s[:rank])
    return root[:, None] * (vt[:rank] @ q.T), u[:, :rank] * root


def _map_adapters[Model: nnx.Module](
    change: Callable[[Stored, Adapter], None], model: Model, rules: Rules
) -> Model:
    """The model after change(w, adapter) of a copy of every adapter."""

    def changed(node: Any) -> Any:
        if not isinstance(node, Linear | MoE):
            return node
        new = jax.tree.map(lambda leaf: leaf, node)
        for name, adapter in adapted_weights(new).items():
            w = getattr(node, name)
            if isinstance(w, QUANTIZED):
                w = gather_stored(w, rules, _axes(node, name, w), len(adapter.a_axes) - 1)
            change(w, adapter)
        return new

    return jax.tree.map(changed, model, is_leaf=lambda node: isinstance(node, Linear | MoE))


def adapted_weights(module: Linear | MoE) -> dict[str, Adapter]:
    """The adapters of a module by the names of the weights that they change."""
    adapters = module.lora if isinstance(module, MoE) else {"w": module.lora}
    return {name: adapter for name, adapter in adapters.items() if adapter is not None}


def _axes(module: Linear | MoE, name: str, w: Stored) -> Axes:
    """Logical axes of the weight w of this name, with those of stacked layers."""
    axes = AXES[name] if isinstance(module, MoE) else module.axes
    return ("layers",) * (len(w.shape) - len(axes)) + axes


def _float32(w: Stored) -> jax.Array:
    return dense(w, jnp.float32) if isinstance(w, QUANTIZED) else w.astype(jnp.float32)


@jax.jit
def _norms(w: Stored, like: jax.Array) -> jax.Array:
    """The norms [*out] of w [*out, *in], with the dtype and sharding of `like`."""
    values = _float32(w)
    norms = jnp.sqrt(jnp.sum(jnp.square(values), axis=tuple(range(like.ndim, values.ndim))))
    return jax.reshard(norms.astype(like.dtype), jax.typeof(like).sharding.spec)


@functools.partial(jax.jit, static_argnames=("scale", "n_out"))
def _start(
    w: Stored, a: jax.Array, b: jax.Array, *, scale: float, n_out: int
) -> tuple[jax.Array, jax.Array]:
    """(A, B) with scale B A nearest to w, with the shapes, dtypes and shardings of `a` and `b`.

    All may have leading layers and experts. Every device computes the same numbers, whatever the
    mesh is.
    """

    def one(w: Stored) -> tuple[jax.Array, jax.Array]:
        values = jax.reshard(_float32(w), jax.P())
        matrix = values.reshape(math.prod(values.shape[:n_out]), -1)
        return principal(matrix / scale, b.shape[-1])

    find, n_lead = one, b.ndim - n_out - 1
    for _ in range(n_lead):
        find = functools.partial(jax.lax.map, find)
    found = find(jax.tree.map(functools.partial(_whole, n_lead=n_lead), w))
    return tuple(
        jax.reshard(part.reshape(like.shape).astype(like.dtype), jax.typeof(like).sharding.spec)
        for part, like in zip(found, (a, b), strict=True)
    )


def _whole(w: jax.Array, n_lead: int) -> jax.Array:
    """The array without sharding of its first axes."""
    return jax.reshard(w, jax.P(*[None] * n_lead, *jax.typeof(w).sharding.spec[n_lead:]))
