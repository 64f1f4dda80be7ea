"""Equal slices of an array's first axis, so that the device holds one of them at a time."""

import math

import jax

SLICE_BYTES = 2**28  # of a slice in float32, per device


def slice_count(array: jax.Array, rows: int | None = None) -> int:
    """Least number of equal slices of at most SLICE_BYTES, or one for every index.

    1 if the first axis is sharded, or if its size has no suitable divisor. `rows`: what the number
    divides in place of that size.
    """
    sharding = jax.typeof(array).sharding
    local = sharding.shard_shape(array.shape)
    if local[0] != array.shape[0]:
        return 1
    rows = rows or array.shape[0]
    least = min(_least(math.prod(local)), rows)
    return next((n for n in range(least, 16 * least) if rows % n == 0), 1)


def block_count(size: int, n_indices: int) -> int:
    """Least divisor of `n_indices` that splits `size` numbers into parts of at most SLICE_BYTES.

    `n_indices` if none does.
    """
    return next((n for n in range(_least(size), n_indices) if n_indices % n == 0), n_indices)


def _least(size: int) -> int:
    return -(-4 * size // SLICE_BYTES)


def take_slice(array: jax.Array, i: jax.Array, n_slices: int) -> jax.Array:
    """Slice i of n_slices, in the memory space of the array."""
    size = array.shape[0] // n_slices
    return jax.lax.dynamic_slice_in_dim(array, i * size, size)


def put_slice(array: jax.Array, part: jax.Array, i: jax.Array) -> jax.Array:
    """The array with slice i replaced; both are in the same memory space."""
    return jax.lax.dynamic_update_slice_in_dim(array, part, i * part.shape[0], 0)
