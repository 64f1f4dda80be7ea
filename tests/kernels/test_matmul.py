"""Matrix products (jaxrl/kernels/matmul) against the reference; which of them a C kernel does."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.kernels.cpu import native, ops
from jaxrl.kernels.matmul import IMPLEMENTATIONS, matmul, matmuls
from sharding import make_mesh

CALL = 'custom_call_target="jaxrl_skinny_matmul"'


@pytest.fixture
def kernels(one_device):
    """Requires the kernels if there is a compiler; skips the test otherwise."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    assert native.is_available()


@pytest.fixture
def any_order(monkeypatch):
    """Takes the kernel for every shape, in whatever order XLA sums on this processor."""
    monkeypatch.setattr(ops, "matmul_bits_match", lambda n_out, n_in: True)


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape, np.float32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("implementation", [None, *sorted(IMPLEMENTATIONS.keys() - {"reference"})])
def test_every_implementation_gives_the_products_of_the_reference(
    kernels, any_order, implementation, dtype
):
    if implementation == "native" and dtype != "float32":
        pytest.skip("the kernel is for float32")
    x = jnp.array(normal(8, 1, 64))
    weights = [jnp.array(normal(n, 64)) for n in (40, 24)]
    if dtype == "int8":
        weights = [jnp.round(20 * w).astype(jnp.int8) for w in weights]
    else:
        x, weights = x.astype(dtype), [w.astype(dtype) for w in weights]
    out = [jax.P()] * 2
    got = matmuls(x, weights, out_shardings=out, implementation=implementation)
    want = matmuls(x, weights, out_shardings=out, implementation="reference")
    tolerance = 1e-2 if dtype == "bfloat16" else 1e-5
    for y, ref in zip(got, want, strict=True):
        assert y.dtype == ref.dtype and y.shape == ref.shape
        np.testing.assert_allclose(y, ref, rtol=tolerance, atol=10 * tolerance)


def test_the_reference_is_the_sum_over_inputs(one_device):
    x, w = jnp.array([[[1.0, 2.0], [3.0, 4.0]]]), jnp.array([[1, 1], [0, -2], [5, 0]], jnp.int8)
    [y] = IMPLEMENTATIONS["reference"](x, [w], [jax.P()], jnp.bfloat16)
    np.testing.assert_array_equal(np.float32(y), [[[3, -4, 5], [7, -8, 15]]])
    assert y.dtype == jnp.bfloat16


def test_the_named_kernel_says_what_it_does_not_multiply(one_device):
    with pytest.raises(NotImplementedError, match="one float32 token per row"):
        x, w = jnp.ones((8, 2, 64)), jnp.ones((24, 64))
        matmuls(x, [w], out_shardings=[jax.P()], implementation="native")


def test_weights_of_one_input_are_read_in_one_call(kernels, any_order):
    """Weight sizes end at and inside a work item."""
    x, weights = normal(8, 1, 64), [normal(n, 64) for n in (192, 200, 576)]
    together = jax.jit(lambda x, *ws: matmuls(x, ws, out_shardings=[jax.P()] * len(ws)))
    assert together.lower(x, *weights).compile().as_text().count(CALL) == 1
    for y, w in zip(together(x, *weights), weights, strict=True):
        np.testing.assert_array_equal(y, jax.jit(ops.skinny_matmul)(x[:, 0], w)[0][:, None])


def test_an_unsupported_weight_does_not_affect_the_others(kernels, any_order):
    x, weights = normal(8, 1, 64), [normal(200, 64), normal(192, 64).astype(jnp.bfloat16)]
    mixed = jax.jit(lambda x, *ws: matmuls(x, ws, out_shardings=[jax.P()] * len(ws)))
    assert mixed.lower(x, *weights).compile().as_text().count(CALL) == 1
    for y, w in zip(mixed(x, *weights), weights, strict=True):
        np.testing.assert_allclose(y[:, 0], x[:, 0] @ np.float32(w).T, rtol=1e-4, atol=1e-4)


def test_xla_keeps_products_that_it_sums_in_another_order(kernels):
    """XLA splits the sums of some narrow products differently; which ones is unspecified."""
    x, w = normal(64, 1, 576), normal(96, 576)
    f = jax.jit(lambda x, w: matmul(x, w, out_sharding=jax.P()))
    np.testing.assert_array_equal(f(x[:8], w)[:, 0], f(x.swapaxes(0, 1), w)[0, :8])


def compiled(x, w) -> str:
    f = jax.jit(lambda x, w: matmul(x, w, out_sharding=jax.P()))
    return f.lower(x, w).compile().as_text()


def test_only_one_token_per_row_uses_the_kernel(kernels):
    w = normal(128, 64)
    assert "jaxrl_skinny_matmul" in compiled(normal(8, 1, 64), w)
    for x, weight in (
        (normal(8, 2, 64), w),  # a chunk of prefill, or training
        (normal(65, 1, 64), w),
        (normal(8, 1, 64).astype(jnp.bfloat16), w.astype(jnp.bfloat16)),
    ):
        assert "jaxrl_skinny_matmul" not in compiled(x, weight)
    with jax.set_mesh(make_mesh(tensor=2)):
        assert "jaxrl_skinny_matmul" not in compiled(normal(8, 1, 64), w)


@pytest.mark.bitwise
def test_one_output_of_a_token_does_not_depend_on_the_number_of_tokens(one_device):
    x, w = jnp.array(normal(1, 64, 48)), jnp.array(normal(1, 48))
    run = jax.jit(lambda x, w: matmul(x, w, out_sharding=jax.P()))
    whole = run(x, w)[0]
    for n in (1, 3, 33):
        np.testing.assert_array_equal(run(x[:, :n], w)[0], whole[:n])
        np.testing.assert_array_equal(run(x[0, :n, None], w)[:, 0], whole[:n])
