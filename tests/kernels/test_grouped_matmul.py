"""Grouped matrix products (jaxrl/kernels/grouped_matmul/) against the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jaxrl.kernels.grouped_matmul import IMPLEMENTATIONS, grouped_matmul
from jaxrl.kernels.grouped_matmul.blocks import block_rows
from jaxrl.kernels.grouped_matmul.stack import grouped_matmul_stack
from jaxrl.kernels.grouped_matmul.tiles import (
    MAX_HEIGHT,
    SHARED_TILES,
    row_tiles,
    tile_height,
    tile_in_order,
    tile_of,
)
from jaxrl.kernels.grouped_matmul.triton import grouped_matmul_triton
from jaxrl.planner.chips import ADA

M, D, F, E = 100, 24, 40, 6
GROUPS = {
    "even": (17, 17, 17, 17, 16, 16),
    "empty groups": (0, 60, 0, 39, 1, 0),
    "one group": (0, 0, 0, 0, 100, 0),
    "rows of no group": (3, 0, 20, 9, 0, 5),
    "no rows": (0, 0, 0, 0, 0, 0),
}


def problem(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = ((M, D), (E, F, D), (M, F))
    return tuple(jax.random.normal(k, s, dtype) for k, s in zip(keys, shapes, strict=True))


def multiplier(name):
    """The implementation; `triton` emulated with XLA."""
    if name == "triton":
        return functools.partial(grouped_matmul_triton, interpret=True)
    return functools.partial(grouped_matmul, implementation=name)


@functools.partial(jax.jit, static_argnames="name")
def value_and_grads(x, w, sizes, dy, name):
    y, pull = jax.vjp(lambda x, w: multiplier(name)(x, w, sizes), x, w)
    return y, *pull(dy)


def test_each_row_is_multiplied_with_its_groups_matrix():
    x = jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]])
    w = jnp.array([[[1.0, 0.0]], [[9.0, 9.0]], [[1.0, 10.0]]])  # one row each
    sizes = jnp.array([1, 0, 2])
    # row 0 x [1, 0]: 1; rows 1 and 2 x [1, 10]: 3 + 40, 5 + 60; row 3 is in no group
    for name in IMPLEMENTATIONS:
        np.testing.assert_array_equal(multiplier(name)(x, w, sizes), [[1.0], [43.0], [65.0], [0.0]])


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("name", [None, "blocks", "ragged_dot", "triton"])
def test_value_and_gradients_equal_the_reference(name, groups):
    x, w, dy = problem()
    sizes = jnp.array(GROUPS[groups], jnp.int32)
    want = value_and_grads(x, w, sizes, dy, "reference")
    for a, b in zip(value_and_grads(x, w, sizes, dy, name), want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * float(jnp.abs(b).max()) + 1e-30)


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("name", ["blocks", "ragged_dot", "reference", "triton", "stack"])
def test_a_layer_of_a_stack_gives_the_product_of_its_matrices(name, groups):
    x, w, _ = problem()
    stack = jnp.stack([jnp.full_like(w, jnp.nan), w, jnp.full_like(w, jnp.nan)])
    sizes = jnp.array(GROUPS[groups], jnp.int32)
    stack_kernel = functools.partial(grouped_matmul_stack, interpret=True)
    multiply = stack_kernel if name == "stack" else multiplier(name)
    y = jax.jit(multiply)(x, stack, sizes, layer=jnp.int32(1))
    want = grouped_matmul(x, w, sizes, implementation="reference")
    np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("n_rows", "F", "groups"),
    [
        pytest.param(300, 40, (0, 7, 190, 0, 40, 1), marks=pytest.mark.thorough),
        (5, 128, (5, 0, 0, 0, 0, 0)),
    ],
)
def test_the_tpu_kernel_of_a_stack_reads_no_memory_that_it_has_not_written(n_rows, F, groups):
    """Emulated with a TPU's memories, which start with NaN; the last tile of rows is partial."""
    x = jax.random.normal(jax.random.key(0), (n_rows, D), jnp.bfloat16)
    w = jax.random.randint(jax.random.key(1), (2, E, F, D), -128, 128, jnp.int8)
    sizes = jnp.array(groups, jnp.int32)
    interpret = pltpu.InterpretParams(uninitialized_memory="nan")
    y = grouped_matmul_stack(x, w, sizes, jnp.int32(1), interpret=interpret)
    want = grouped_matmul(x, w[1], sizes, implementation="reference")
    np.testing.assert_allclose(y.astype(jnp.float32), want.astype(jnp.float32), rtol=2**-7, atol=1)


@pytest.mark.parametrize("name", ["blocks", "ragged_dot", "triton"])
def test_bfloat16_is_summed_in_float32(name):
    x, w, dy = problem(jnp.bfloat16)
    sizes = jnp.array(GROUPS["even"], jnp.int32)
    wide = value_and_grads(
        *(a.astype(jnp.float32) for a in (x, w)), sizes, dy.astype(jnp.float32), "reference"
    )
    for a, b in zip(value_and_grads(x, w, sizes, dy, name), wide, strict=True):
        assert a.dtype == jnp.bfloat16
        np.testing.assert_allclose(a.astype(jnp.float32), b, rtol=2**-8, atol=1e-3)  # one rounding


@pytest.mark.bitwise
def test_a_rows_bits_do_not_depend_on_other_rows():
    """With another block size, group size and position in the group."""
    D, F, E = 256, 384, 4
    x = jax.random.normal(jax.random.key(1), (1024, D))
    w = jax.random.normal(jax.random.key(2), (E, F, D))
    multiply = jax.jit(functools.partial(grouped_matmul, implementation="blocks"))
    assert block_rows(1024, E) == 128 and block_rows(9, E) == 8
    many = multiply(x, w, jnp.array([500, 0, 500, 24]))
    few = multiply(x[497:506], w, jnp.array([3, 0, 6, 0]))
    np.testing.assert_array_equal(many[497:506], few)
    shifted = multiply(x[97:], w, jnp.array([403, 0, 500, 24]))
    np.testing.assert_array_equal(many[97:], shifted)


@pytest.mark.thorough
def test_several_tiles_of_rows_columns_and_depth():
    """Groups and matrices of more than one tile, none of them a multiple of its size."""
    M, D, F, sizes = 700, 200, 150, jnp.array([290, 0, 350])
    keys = jax.random.split(jax.random.key(3), 3)
    shapes = (M, D), (len(sizes), F, D), (M, F)
    x, w, dy = (jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True))
    want = value_and_grads(x, w, sizes, dy, "reference")
    for a, b in zip(value_and_grads(x, w, sizes, dy, "triton"), want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * float(jnp.abs(b).max()))


@pytest.mark.parametrize("name", ["blocks", "triton"])
def test_int8_matrices_are_converted_and_have_no_gradient(name):
    x, w, dy = problem()
    sizes, whole = jnp.array(GROUPS["rows of no group"]), jnp.round(10 * w)
    y, pull = jax.vjp(lambda x: multiplier(name)(x, whole.astype(jnp.int8), sizes), x)
    want = value_and_grads(x, whole, sizes, dy, "reference")
    for a, b in zip((y, *pull(dy)), want, strict=False):
        np.testing.assert_allclose(a, b, atol=1e-5 * float(jnp.abs(b).max()))


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("height", [16, 64])
def test_tiles_cover_every_row_once(groups, height):
    group, first, rows = map(np.asarray, row_tiles(jnp.array(GROUPS[groups]), M, height))
    covered = [(g, r + i) for g, r, n in zip(group, first, rows, strict=True) for i in range(n)]
    ends = np.cumsum([*GROUPS[groups], M])
    want = [(int(np.searchsorted(ends, row, side="right")), row) for row in range(M)]
    assert sorted(covered, key=lambda one: one[1]) == want
    assert max(rows) <= height


def test_most_groups_are_one_tile_in_decode_and_all_tiles_are_large_in_training():
    assert tile_height(64 * 8, 128) == 16 and tile_height(256 * 8, 128) == 32
    assert tile_height(8192 * 8, 128) == 128


def test_tiles_fit_the_shared_memory_of_their_gpu():
    """And use the tensor cores of Hopper and Blackwell with wide tiles."""
    large = tile_of(MAX_HEIGHT, "NVIDIA H100 80GB HBM3")
    assert (large.name, large.shared_bytes) == ("128x256", 192 * 1024)
    for height in (16, 32, 64, 128):
        assert tile_of(height, "NVIDIA GeForce RTX 4090").shared_bytes <= ADA.block_shared_bytes


@pytest.mark.parametrize(("n_tiles", "n_columns"), [(19, 6), (3, 4), (8, 1), (1, 1)])
def test_programs_of_adjacent_numbers_share_rows_and_columns(n_tiles, n_columns):
    order = tile_in_order(jnp.arange(n_tiles * n_columns), n_tiles, n_columns)
    pairs = list(zip(*(np.asarray(a).tolist() for a in order), strict=True))
    assert sorted(pairs) == [(i, j) for i in range(n_tiles) for j in range(n_columns)]
    together = pairs[: min(SHARED_TILES, n_tiles) * n_columns]
    assert {i for i, _ in together} == set(range(min(SHARED_TILES, n_tiles)))
    assert [j for _, j in together] == sorted(j for _, j in together)


def test_triton_needs_a_gpu():
    x, w, _ = problem()
    with pytest.raises(NotImplementedError, match="'triton' runs on gpu and these devices are cpu"):
        grouped_matmul(x, w, jnp.zeros(E, jnp.int32), implementation="triton")


def test_an_unknown_kernel_is_a_clear_error():
    x, w, _ = problem()
    with pytest.raises(ValueError, match="'nothing' is not known; set one of auto, blocks"):
        grouped_matmul(x, w, jnp.zeros(E, jnp.int32), implementation="nothing")
