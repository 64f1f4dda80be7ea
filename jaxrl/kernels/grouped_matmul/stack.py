"""Grouped matrix product with one of stacked layers on TPU: a Pallas kernel that reads in place.

XLA's ragged_dot needs the matrices of the layer as an array, which is a copy of all of them. Over
those of all layers, without rows for the others, it would plan its work in a loop of L x E groups.

The grid has one step per tile of rows and group with rows in it, as in megablox
(https://github.com/jax-ml/jax/tree/main/jax/experimental/pallas/ops/tpu/megablox). Consecutive
steps of a group read its matrix once; the next group's is copied during the present product.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, Int8

MAX_ROWS = 128  # of a tile
LANES = 128
MATRIX_BYTES = 2**22  # of a block of a matrix; VMEM holds two, and two blocks of x and of y
SPARE_BYTES = 2**22  # of VMEM


def grouped_matmul_stack(
    x: Float[Array, "M D"],
    w: Float[Array, "L E F D"] | Int8[Array, "L E F D"],
    sizes: Int[Array, "E"],
    layer: Int[Array, ""],
    *,
    interpret: bool | pltpu.InterpretParams = False,
) -> Float[Array, "M F"]:
    """Grouped product with the matrices of layer `layer`, of which it reads those with rows.

    int8 matrices are converted after they are read. `interpret` emulates the kernel on any backend:
    True with XLA, and InterpretParams with the memories and copies of a TPU.
    """
    (M, D), F = x.shape, w.shape[2]
    m, n = min(M, MAX_ROWS), F
    if F * D * w.dtype.itemsize > MATRIX_BYTES:
        n = max(MATRIX_BYTES // (D * w.dtype.itemsize) // LANES, 1) * LANES
    # XLA stores matrices whose D does not fill its lanes as [D, F]; another order would be a copy.
    transposed = D % LANES > 0 and F % LANES == 0
    w = jnp.swapaxes(w, 2, 3) if transposed else w
    block, at = ((D, n), lambda f: (0, f)) if transposed else ((n, D), lambda f: (f, 0))
    groups, tiles, count = _steps(sizes, M, m)
    ends = jnp.cumsum(sizes)
    scalars = layer[None], ends - sizes, ends, groups, tiles
    block_bytes = m * D * x.dtype.itemsize + n * D * w.dtype.itemsize + m * n * x.dtype.itemsize
    product_bytes = m * n * 4 + n * D * x.dtype.itemsize * (w.dtype != x.dtype)
    y = pl.pallas_call(
        functools.partial(_kernel, m, transposed),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(pl.cdiv(F, n), count),
            in_specs=[
                pl.BlockSpec((m, D), lambda f, i, *s: (s[-1][i], 0)),
                pl.BlockSpec((None, None, *block), lambda f, i, *s: (s[0][0], s[-2][i], *at(f))),
            ],
            out_specs=pl.BlockSpec((m, n), lambda f, i, *s: (s[-1][i], f)),
        ),
        out_shape=jax.typeof(x).update(shape=(M, F)),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=2 * block_bytes + product_bytes + SPARE_BYTES,
        ),
        name="grouped_matmul_stack",
        interpret=interpret,
    )(*scalars, x, w)
    # Tiles without rows are never written.
    return jnp.where((jnp.arange(M) < ends[-1])[:, None], y, 0)


def _steps(sizes: Int[Array, "E"], M: int, m: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(group, tile of m rows) of every step in order of rows, and how many there are: at least 1.

    Comparisons with all groups instead of searches and gathers, which are slow on TPU.
    """
    E, ends = sizes.shape[0], jnp.cumsum(sizes)
    first_tile = (ends - sizes) // m
    n_tiles = jnp.where(sizes > 0, -(-ends // m) - first_tile, 0)
    last_step = jnp.cumsum(n_tiles)
    step = jnp.arange(pl.cdiv(M, m) + E - 1)
    groups = jnp.minimum(jnp.sum(step[:, None] >= last_step, axis=1, dtype=jnp.int32), E - 1)
    own = groups[:, None] == jnp.arange(E)
    tiles = step + jnp.sum(jnp.where(own, first_tile - (last_step - n_tiles), 0), axis=1)
    return groups, tiles.astype(jnp.int32), jnp.maximum(last_step[-1], 1)


def _kernel(m: int, transposed: bool, layer, starts, ends, groups, tiles, x_ref, w_ref, y_ref):
    """The rows of one group in one tile; steps of other groups write the other rows."""
    step = pl.program_id(1)
    group = groups[step]
    row = tiles[step] * m + lax.broadcasted_iota(jnp.int32, y_ref.shape, 0)
    own = (row >= starts[group]) & (row < ends[group])
    x = x_ref[...]
    inputs = (((1,), (0 if transposed else 1,)), ((), ()))
    y = lax.dot_general(x, w_ref[...].astype(x.dtype), inputs, preferred_element_type=jnp.float32)
    y_ref[...] = jnp.where(own, y, y_ref[...].astype(jnp.float32)).astype(y_ref.dtype)
