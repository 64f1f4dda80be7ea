"""Grouped matrix product in plain XLA: a loop over blocks of rows of one group.

A block is one matrix product of a fixed shape, so a row's bits depend neither on the size of its
group nor on the other rows. The loop runs once per block: empty groups cost nothing, and nothing is
padded to a capacity.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Int8

MIN_ROWS, MAX_ROWS = 8, 128  # of a block; XLA on CPU uses another algorithm for one row


def grouped_matmul_blocks(
    x: Float[Array, "M D"],
    w: Float[Array, "*L E F D"] | Int8[Array, "*L E F D"],
    sizes: Int[Array, "E"],
    layer: Int[Array, ""] | None = None,
) -> Float[Array, "M F"]:
    """Grouped product that reads a group's matrix once per block of its rows, and no other."""
    if layer is None:
        return _multiply_layer(x, w, sizes)
    return _multiply(x, w, sizes, "md,fd->mf", w.shape[-2], layer)


@jax.custom_vjp
def _multiply_layer(
    x: Float[Array, "M D"], w: Float[Array, "E F D"] | Int8[Array, "E F D"], sizes: Int[Array, "E"]
) -> Float[Array, "M F"]:
    return _multiply(x, w, sizes, "md,fd->mf", w.shape[1])


def _forward(x, w, sizes):
    return _multiply_layer(x, w, sizes), (x, w, sizes)


def _backward(saved, grad):
    x, w, sizes = saved
    dx = _multiply(grad, w, sizes, "mf,fd->md", w.shape[2])
    frozen = not jnp.issubdtype(w.dtype, jnp.floating)
    return dx, None if frozen else _weight_gradient(x, grad, w, sizes), None


_multiply_layer.defvjp(_forward, _backward)


def _multiply(
    x: jax.Array,
    w: jax.Array,
    sizes: jax.Array,
    eq: str,
    n_out: int,
    layer: jax.Array | None = None,
) -> jax.Array:
    """[M, n_out]: the einsum `eq` of each block of `x` and its group's matrix."""
    n, m = x.shape[0], block_rows(x.shape[0], sizes.shape[0])
    blocks, total = GroupBlocks(sizes, m), jnp.sum(sizes)
    matrices = w.reshape(-1, *w.shape[-2:])
    first = 0 if layer is None else layer * sizes.shape[0]
    x = jnp.pad(x, ((0, m), (0, 0)))  # the last block may reach past the end

    def block(i, out):
        group, row, _ = blocks.place(i)
        rows = lax.dynamic_slice_in_dim(x, row, m)
        matrix = lax.dynamic_index_in_dim(matrices, first + group, keepdims=False).astype(x.dtype)
        y = jnp.einsum(eq, rows, matrix, preferred_element_type=jnp.float32)
        # What reaches into the next group is overwritten by that group's first block.
        y = jnp.where((row + jnp.arange(m) < total)[:, None], y, 0.0).astype(x.dtype)
        return lax.dynamic_update_slice_in_dim(out, y, row, 0)

    out = _zeros((n + m, n_out), x.dtype, like=(x, w, sizes))
    return lax.fori_loop(0, blocks.count, block, out)[:n]


def _weight_gradient(x: jax.Array, grad: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    """[E, F, D]: gradᵀ x, summed over the rows of each group in float32."""
    m = block_rows(x.shape[0], w.shape[0], max_rows=2 * MAX_ROWS)  # a block updates a whole matrix
    blocks = GroupBlocks(sizes, m)
    x, grad = (jnp.pad(a, ((0, m), (0, 0))) for a in (x, grad))

    def block(i, dw):
        group, row, n_rows = blocks.place(i)
        rows, g = (lax.dynamic_slice_in_dim(a, row, m) for a in (x, grad))
        g = jnp.where((jnp.arange(m) < n_rows)[:, None], g, 0)
        product = jnp.einsum("mf,md->fd", g, rows, preferred_element_type=jnp.float32)
        return dw.at[group].add(product)

    dw = _zeros(w.shape, jnp.float32, like=(x, grad, w, sizes))
    return lax.fori_loop(0, blocks.count, block, dw).astype(w.dtype)


class GroupBlocks:
    """Blocks of at most `m` rows over consecutive groups of `sizes` rows."""

    def __init__(self, sizes: Int[Array, "E"], m: int):
        self.m, self.sizes = m, sizes
        self.first_row = jnp.cumsum(sizes) - sizes
        n_blocks = -(-sizes // m)
        self.ends = jnp.cumsum(n_blocks)
        self.first_block = self.ends - n_blocks
        self.count = self.ends[-1]

    def place(self, i: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(group, first row, number of rows) of block i."""
        group = jnp.searchsorted(self.ends, i, side="right", method="compare_all")
        done = (i - self.first_block[group]) * self.m
        rows = jnp.minimum(self.sizes[group] - done, self.m)
        return group, self.first_row[group] + done, rows


def block_rows(n_rows: int, n_groups: int, *, max_rows: int = MAX_ROWS) -> int:
    """A power of two near the average group size. Larger blocks read fewer matrices but waste more
    rows.
    """
    average = max(n_rows / n_groups, 1)
    return min(max(2 ** math.ceil(math.log2(average)), MIN_ROWS), max_rows)


def _zeros(shape: tuple[int, ...], dtype: DTypeLike, *, like: tuple[jax.Array, ...]) -> jax.Array:
    """Zeros for a loop carry: inside shard_map they vary over the mesh axes of `like`."""
    zero = sum((jnp.ravel(a)[0] > 0).astype(jnp.int32) * 0 for a in like)
    return jnp.zeros(shape, dtype) + jnp.asarray(zero).astype(dtype)
