"""The product of activations with a weight matrix: of few rows, in decoding, by a kernel of its own on CPU."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int8

from jaxrl.kernels import native


def product(
    x: Float[Array, "B T I"],
    w: Float[Array, "O I"] | Int8[Array, "O I"],
    *,
    out_sharding: jax.P,
    dtype: DTypeLike | None = None,
) -> Float[Array, "B T O"]:
    """x wᵀ, accumulated in and returned as `dtype` where it is given.

    One token a row (T = 1) is decoding: it has no gradient, and on one CPU device float32 products of up to
    64 rows then run at the speed of memory, with the bits of XLA's product. int8 weights are multiplied as
    numbers of the type of `x`.
    """
    if w.dtype == jnp.int8:
        # Of this step's x: alone, the conversion would be done before a loop and its result kept.
        x, w = jax.lax.optimization_barrier((x, w))
        w = w.astype(x.dtype)
    if native.takes_rows(x, w):
        return _native_product(x, w, out_sharding)
    eq = "BTI,OI->BTO"
    return jnp.einsum(eq, x, w, out_sharding=out_sharding, preferred_element_type=dtype)


def _native_product(x: jax.Array, w: jax.Array, out_sharding: jax.P) -> jax.Array:
    local = jax.shard_map(
        lambda x, w: native.few_rows(x[:, 0], w)[:, None],
        in_specs=jax.P(),
        out_specs=jax.P(),
        check_vma=False,
    )
    return jax.reshard(local(jax.reshard(x, jax.P()), jax.reshard(w, jax.P())), out_sharding)
