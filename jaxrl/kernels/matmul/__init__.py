"""Matrix products of activations and weights; in decode on CPU, small batches use a C kernel."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int8

from jaxrl.kernels.cpu import ops

Weight = Float[Array, "_ I"] | Int8[Array, "_ I"]  # [out, in]


def matmul(
    x: Float[Array, "B T I"], w: Weight, *, out_sharding: jax.P, dtype: DTypeLike | None = None
) -> Float[Array, "B T _"]:
    """x wᵀ [B, T, out], accumulated in and returned as `dtype` (default: that of the operands)."""
    return matmuls(x, [w], out_shardings=[out_sharding], dtype=dtype)[0]


def matmuls(
    x: Float[Array, "B T I"],
    weights: Sequence[Weight],
    *,
    out_shardings: Sequence[jax.P],
    dtype: DTypeLike | None = None,
) -> list[Float[Array, "B T _"]]:
    """`matmul` with each of the weights.

    One token per row (T = 1) is decode and needs no gradient. On one CPU device, float32 products
    of up to 64 rows then run at memory bandwidth, up to four weights per call, with the bits of
    XLA's product. int8 weights are converted to the dtype of `x`.
    """
    supported = [ops.supports_skinny_matmul(x, w) for w in weights]
    if all(supported) and len(weights) <= ops.MAX_WEIGHTS:
        return _native_matmuls(x, weights, out_shardings)
    return [
        _native_matmuls(x, [w], [out])[0] if native else _xla_matmul(x, w, out, dtype)
        for w, out, native in zip(weights, out_shardings, supported, strict=True)
    ]


def _xla_matmul(x: jax.Array, w: jax.Array, out_sharding: jax.P, dtype) -> jax.Array:
    if w.dtype == jnp.int8:
        # The barrier ties the conversion to x: otherwise XLA hoists it out of loops and keeps the
        # converted weights.
        x, w = jax.lax.optimization_barrier((x, w))
        w = w.astype(x.dtype)
    eq = "BTI,OI->BTO"
    return jnp.einsum(eq, x, w, out_sharding=out_sharding, preferred_element_type=dtype)


def _native_matmuls(x: jax.Array, weights: Sequence[jax.Array], out_shardings) -> list[jax.Array]:
    local = jax.shard_map(
        lambda x, *weights: [y[:, None] for y in ops.skinny_matmul(x[:, 0], *weights)],
        in_specs=jax.P(),
        out_specs=jax.P(),
        check_vma=False,
    )
    ys = local(*(jax.reshard(a, jax.P()) for a in (x, *weights)))
    return [jax.reshard(y, out) for y, out in zip(ys, out_shardings, strict=True)]
