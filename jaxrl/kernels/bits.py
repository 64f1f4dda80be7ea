"""Shape-independent arithmetic on CPU: the same bits in any batch and any program.

Trainer and engine compute the same token in different batches and programs. XLA on CPU rounds
differently in the two: it contracts a product and a sum inside a fusion, and the summation order of
a row depends on the array's size and on the fusion. On other platforms these functions are the
plain operations.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from sharding import target_platform

MIN_SIZE = 4096  # elements; XLA sums smaller arrays in another order

# Compiler options of every program that reads the policy. XLA by default leaves out some roundings
# to bfloat16 between two operations, and not the same ones in the programs of trainer and engine.
ROUND_AS_WRITTEN = {"xla_allow_excess_precision": False}


def materialize(x: jax.Array) -> jax.Array:
    """`x` rounded to its dtype; on CPU a barrier that XLA cannot fuse or contract across."""
    return jax.lax.optimization_barrier(x) if target_platform() == "cpu" else x


def row_sum(x: Float[Array, "*B M S"]) -> Float[Array, "*B M"]:
    """Σ over the last axis. On CPU a row's bits do not depend on the number of other rows."""
    if target_platform() != "cpu":
        return jnp.sum(x, axis=-1)
    rows, copies = x.shape[-2], -(-MIN_SIZE // max(x.size, 1))
    if copies > 1:  # a multiple of the rows keeps a sharded axis divisible
        x = jnp.pad(x, ((0, 0),) * (x.ndim - 2) + ((0, rows * (copies - 1)), (0, 0)))
    return jnp.sum(materialize(x), axis=-1)[..., :rows]


def rsqrt(x: jax.Array) -> jax.Array:
    """1 / √x. On CPU, XLA's rsqrt of a vector has other last bits than that of one number.

    The barrier keeps XLA from replacing root and quotient by its rsqrt.
    """
    return 1 / materialize(jnp.sqrt(x)) if target_platform() == "cpu" else jax.lax.rsqrt(x)
