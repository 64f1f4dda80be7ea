"""Grouped matrix product on NVIDIA GPUs: Pallas kernels in Triton, forward and backward.

The rows of a group are cut into tiles. One kernel computes all tiles of all groups at the same
time, each with its group's matrix (MegaBlocks, https://arxiv.org/abs/2211.15841, section 5). The
gradient of the matrices is a kernel over tiles of the matrices, which sums over the rows of their
group. Matrices of an integer dtype are converted as they are loaded. Sums are float32.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int, Int8

from jaxrl.kernels.choice import check_platform
from jaxrl.kernels.grouped_matmul.tiles import (
    MAX_HEIGHT,
    WIDTH,
    row_tiles,
    tile_height,
    tile_in_order,
)

DEPTH_BYTES = 128  # of each row of an operand, loaded at one time


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Static parameters of a kernel; `interpret` emulates it with XLA."""

    height: int
    depth: int
    interpret: bool

    def call(self, kernel, name: str, *, grid: tuple[int, ...], out):
        return pl.pallas_call(
            functools.partial(kernel, self),
            name=name,
            grid=grid,
            out_specs=pl.no_block_spec,
            out_shape=out,
            interpret=self.interpret,
            compiler_params=plgpu.CompilerParams(
                num_warps=8 if self.height == MAX_HEIGHT else 4, num_stages=3
            ),
        )


def grouped_matmul_triton(
    x: Float[Array, "M D"],
    w: Float[Array, "E F D"] | Int8[Array, "E F D"],
    sizes: Int[Array, "E"],
    *,
    interpret: bool = False,
) -> Float[Array, "M F"]:
    """Grouped product whose tiles of rows run in parallel.

    `interpret` emulates the kernels with XLA on any backend. Raises NotImplementedError without a
    GPU.
    """
    if not interpret:
        check_platform("config.model.grouped_matmul", "triton", "gpu")
    height, depth = tile_height(len(x), len(sizes)), DEPTH_BYTES // x.dtype.itemsize
    return _product(Tiling(height, depth, interpret), x, w, sizes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(tiling: Tiling, x, w, sizes):
    return _multiply_rows(tiling, x, w, sizes, transposed=True)


def _forward(tiling: Tiling, x, w, sizes):
    return _product(tiling, x, w, sizes), (x, w, sizes)


def _backward(tiling: Tiling, saved, dy):
    x, w, sizes = saved
    dx = _multiply_rows(tiling, dy, w, sizes, transposed=False)
    frozen = not jnp.issubdtype(w.dtype, jnp.floating)
    return dx, None if frozen else _weight_gradient(tiling, x, dy, w, sizes), None


_product.defvjp(_forward, _backward)


def _multiply_rows(tiling: Tiling, x, w, sizes, *, transposed: bool) -> jax.Array:
    """[M, n]: each row times its group's matrix [k, n], or the transpose of [n, k]."""
    n = w.shape[1 if transposed else 2]
    tiles = row_tiles(sizes, len(x), tiling.height)
    return tiling.call(
        functools.partial(_rows_kernel, n_groups=len(sizes), transposed=transposed),
        "grouped_matmul_rows",
        grid=(pl.cdiv(n, WIDTH) * len(tiles[0]),),
        out=jax.typeof(x).update(shape=(len(x), n)),
    )(*tiles, x, w)


def _weight_gradient(tiling: Tiling, x, dy, w, sizes) -> jax.Array:
    """[E, F, D]: dyᵀ x, summed over the rows of each group."""
    E, F, D = w.shape
    tiling = dataclasses.replace(tiling, height=MAX_HEIGHT)
    return tiling.call(
        _weights_kernel,
        "grouped_matmul_weights",
        grid=(pl.cdiv(D, WIDTH), pl.cdiv(F, tiling.height), E),
        out=jax.typeof(w),
    )(jnp.cumsum(sizes) - sizes, sizes, x, dy)


def _load(ref, *index):
    """A tile of `ref`, with zeros outside: an index is a number, or (start, length, limit)."""
    ranges = [one for one in index if isinstance(one, tuple)]
    at = [pl.ds(one[0], one[1]) if isinstance(one, tuple) else one for one in index]
    inside = [start + jnp.arange(length) < limit for start, length, limit in ranges]
    return plgpu.load(ref.at[*at], mask=inside[0][:, None] & inside[1][None], other=0)


def _rows_kernel(
    tiling: Tiling, group_ref, row_ref, rows_ref, x_ref, w_ref, y_ref, *,
    n_groups: int, transposed: bool,
):  # fmt: skip
    (_, k), n = x_ref.shape, y_ref.shape[1]
    tile, column = tile_in_order(pl.program_id(0), len(group_ref), pl.cdiv(n, WIDTH))
    group, row, column = group_ref[tile], row_ref[tile], column * WIDTH
    end = row + rows_ref[tile]

    def add(i, total):
        at, width = (i * tiling.depth, tiling.depth, k), (column, WIDTH, n)
        x = _load(x_ref, (row, tiling.height, end), at)
        w = _load(w_ref, group, *((width, at) if transposed else (at, width)))
        return total + plgpu.dot(x, w.astype(x.dtype), trans_b=transposed)

    # Rows of no group are zeros.
    has_rows = (group < n_groups) & (end > row)
    steps = jnp.where(has_rows, jnp.int32(pl.cdiv(k, tiling.depth)), jnp.int32(0))
    total = lax.fori_loop(0, steps, add, jnp.zeros((tiling.height, WIDTH), jnp.float32))
    inside = row + jnp.arange(tiling.height) < end, column + jnp.arange(WIDTH) < n
    plgpu.store(
        y_ref.at[pl.ds(row, tiling.height), pl.ds(column, WIDTH)],
        total.astype(y_ref.dtype),
        mask=inside[0][:, None] & inside[1][None],
    )


def _weights_kernel(tiling: Tiling, first_ref, size_ref, x_ref, dy_ref, dw_ref):
    column, row, group = (
        pl.program_id(0) * WIDTH,
        pl.program_id(1) * tiling.height,
        pl.program_id(2),
    )
    first, (_, F, D) = first_ref[group], dw_ref.shape
    end = first + size_ref[group]

    def add(i, total):
        rows = first + i * tiling.depth, tiling.depth, end
        dy = _load(dy_ref, rows, (row, tiling.height, F))
        return total + plgpu.dot(dy, _load(x_ref, rows, (column, WIDTH, D)), trans_a=True)

    steps = pl.cdiv(end - first, tiling.depth)
    total = lax.fori_loop(0, steps, add, jnp.zeros((tiling.height, WIDTH), jnp.float32))
    inside = row + jnp.arange(tiling.height) < F, column + jnp.arange(WIDTH) < D
    plgpu.store(
        dw_ref.at[group, pl.ds(row, tiling.height), pl.ds(column, WIDTH)],
        total.astype(dw_ref.dtype),
        mask=inside[0][:, None] & inside[1][None],
    )
