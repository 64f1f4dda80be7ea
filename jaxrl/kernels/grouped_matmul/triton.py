"""Grouped matrix product on NVIDIA GPUs: Pallas kernels in Triton, forward and backward.

The rows of a group are cut into tiles. One kernel computes all tiles of all groups at the same
time, each with its group's matrix (MegaBlocks, https://arxiv.org/abs/2211.15841, section 5). The
gradient of the matrices is a kernel over tiles of the matrices, which sums over the rows of their
group. Matrices of an integer dtype are converted as they are loaded. Sums are float32.
"""

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
    Tile,
    row_tiles,
    tile_height,
    tile_in_order,
    tile_of,
)
from sharding import target_device_kind


def grouped_matmul_triton(
    x: Float[Array, "M D"],
    w: Float[Array, "*L E F D"] | Int8[Array, "*L E F D"],
    sizes: Int[Array, "E"],
    layer: Int[Array, ""] | None = None,
    *,
    interpret: bool = False,
) -> Float[Array, "M F"]:
    """Grouped product whose tiles of rows run in parallel.

    `interpret` emulates the kernels with XLA on any backend. Raises NotImplementedError without a
    GPU.
    """
    if not interpret:
        check_platform("config.model.grouped_matmul", "triton", "gpu")
    if layer is None:
        return _product(interpret, x, w, sizes)
    return _multiply_rows(interpret, x, w, sizes, layer, transposed=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(interpret: bool, x, w, sizes):
    return _multiply_rows(interpret, x, w, sizes, transposed=True)


def _forward(interpret: bool, x, w, sizes):
    return _product(interpret, x, w, sizes), (x, w, sizes)


def _backward(interpret: bool, saved, dy):
    x, w, sizes = saved
    dx = _multiply_rows(interpret, dy, w, sizes, transposed=False)
    frozen = not jnp.issubdtype(w.dtype, jnp.floating)
    return dx, None if frozen else _weight_gradient(interpret, x, dy, w, sizes), None


_product.defvjp(_forward, _backward)


def _multiply_rows(interpret: bool, x, w, sizes, *layer, transposed: bool) -> jax.Array:
    """[M, n]: each row times its group's matrix [k, n], or the transpose of [n, k].

    With a `layer`, w is [L, E, ...].
    """
    n = w.shape[-2 if transposed else -1]
    tile = tile_of(tile_height(len(x), len(sizes)), target_device_kind())
    rows = row_tiles(sizes, len(x), tile.height)
    return _call(
        functools.partial(_rows_kernel, tile, n_groups=len(sizes), transposed=transposed),
        f"grouped_matmul_rows_{tile.name}",
        tile,
        grid=(pl.cdiv(n, tile.width) * len(rows[0]),),
        out=jax.typeof(x).update(shape=(len(x), n)),
        interpret=interpret,
    )(*rows, *(one[None] for one in layer), x, w)


def _weight_gradient(interpret: bool, x, dy, w, sizes) -> jax.Array:
    """[E, F, D]: dyᵀ x, summed over the rows of each group."""
    E, F, D = w.shape
    tile = tile_of(MAX_HEIGHT, target_device_kind())
    return _call(
        functools.partial(_weights_kernel, tile),
        f"grouped_matmul_weights_{tile.name}",
        tile,
        grid=(pl.cdiv(D, tile.width), pl.cdiv(F, tile.height), E),
        out=jax.typeof(w),
        interpret=interpret,
    )(jnp.cumsum(sizes) - sizes, sizes, x, dy)


def _call(kernel, name: str, tile: Tile, *, grid: tuple[int, ...], out, interpret: bool):
    return pl.pallas_call(
        kernel,
        name=name,
        grid=grid,
        out_specs=pl.no_block_spec,
        out_shape=out,
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
    )


def _tile(ref, *index):
    """(tile of `ref`, what of it is inside); an index is a number, or (start, length, limit)."""
    ranges = [one for one in index if isinstance(one, tuple)]
    at = [pl.ds(one[0], one[1]) if isinstance(one, tuple) else one for one in index]
    inside = [start + jnp.arange(length) < limit for start, length, limit in ranges]
    return ref.at[*at], inside[0][:, None] & inside[1][None]


def _load(ref, *index):
    """A tile of `ref`, with zeros outside."""
    tile, inside = _tile(ref, *index)
    return plgpu.load(tile, mask=inside, other=0)


def _store(values, ref, *index):
    """Writes the part of a tile of `ref` that is inside."""
    tile, inside = _tile(ref, *index)
    plgpu.store(tile, values.astype(ref.dtype), mask=inside)


def _rows_kernel(
    tile: Tile, group_ref, row_ref, rows_ref, *refs,
    n_groups: int, transposed: bool,
):  # fmt: skip
    *layer_ref, x_ref, w_ref, y_ref = refs
    (_, k), n = x_ref.shape, y_ref.shape[1]
    i, column = tile_in_order(pl.program_id(0), len(group_ref), pl.cdiv(n, tile.width))
    group, row, column = group_ref[i], row_ref[i], column * tile.width
    end, depth = row + rows_ref[i], tile.depth_bytes // x_ref.dtype.itemsize
    layer = [ref[0] for ref in layer_ref]
    rows, columns = (row, tile.height, end), (column, tile.width, n)

    def add(step, total):
        at = step * depth, depth, k
        x = _load(x_ref, rows, at)
        w = _load(w_ref, *layer, group, *((columns, at) if transposed else (at, columns)))
        return total + plgpu.dot(x, w.astype(x.dtype), trans_b=transposed)

    # Rows of no group are zeros.
    has_rows = (group < n_groups) & (end > row)
    steps = jnp.where(has_rows, jnp.int32(pl.cdiv(k, depth)), jnp.int32(0))
    total = lax.fori_loop(0, steps, add, jnp.zeros((tile.height, tile.width), jnp.float32))
    _store(total, y_ref, rows, columns)


def _weights_kernel(tile: Tile, first_ref, size_ref, x_ref, dy_ref, dw_ref):
    column, row, group = (pl.program_id(axis) for axis in range(3))
    column, row = column * tile.width, row * tile.height
    first, (_, F, D) = first_ref[group], dw_ref.shape
    end, depth = first + size_ref[group], tile.depth_bytes // x_ref.dtype.itemsize
    rows, columns = (row, tile.height, F), (column, tile.width, D)

    def add(step, total):
        at = first + step * depth, depth, end
        dy, x = _load(dy_ref, at, rows), _load(x_ref, at, columns)
        return total + plgpu.dot(dy, x, trans_a=True)

    steps = pl.cdiv(end - first, depth)
    total = lax.fori_loop(0, steps, add, jnp.zeros((tile.height, tile.width), jnp.float32))
    _store(total, dw_ref, group, rows, columns)
