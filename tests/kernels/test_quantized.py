"""Quantization (jaxrl/kernels/quantized.py) against scalar arithmetic and its error bounds."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxrl.kernels.quantized import Quantized, dequantize, quantize

DTYPES = {"int8": (np.int8, 127.0), "float8_e4m3fn": (ml_dtypes.float8_e4m3fn, 448.0)}


def numbers(*shape: int) -> np.ndarray:
    """Rows of very different magnitudes, and one of zeros."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal(shape, np.float32) * np.exp(rng.normal(size=(*shape[:-1], 1)) * 3)
    x = x.astype(np.float32)
    x[0] = 0.0
    return x


def twin(x: np.ndarray, n_shared: int, name: str) -> tuple[np.ndarray, np.ndarray]:
    """values and scales, row by row."""
    dtype, most = DTYPES[name]
    lead = x.shape[: x.ndim - n_shared]
    values, scales = np.zeros(x.shape, dtype), np.ones(lead, np.float32)
    for i in np.ndindex(lead):
        top = np.abs(x[i]).max()
        if top > 0:
            scales[i] = np.float32(top) * np.float32(1 / most)
        ratio = x[i] / scales[i]
        values[i] = (np.round(ratio) if name == "int8" else ratio).astype(dtype)
    return values, scales


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("n_shared", [1, 2])
def test_values_and_scales_are_those_of_the_twin(name, n_shared):
    x = numbers(6, 5, 32)
    got = quantize(jnp.asarray(x), n_shared=n_shared, dtype=name)
    values, scales = twin(x, n_shared, name)
    np.testing.assert_array_equal(np.asarray(got.scale), scales)
    np.testing.assert_array_equal(np.asarray(got.values), values)
    scales = scales.reshape(*scales.shape, *(1,) * n_shared)
    np.testing.assert_array_equal(np.asarray(dequantize(got)), values.astype(np.float32) * scales)


@pytest.mark.parametrize("scale_dtype", ["float32", "bfloat16"])
def test_int8_is_off_by_half_a_scale_at_most(scale_dtype):
    x = numbers(200, 64)
    got = quantize(jnp.asarray(x), n_shared=1, dtype="int8", scale_dtype=scale_dtype)
    error, scale = (
        np.abs(np.asarray(dequantize(got)) - x),
        np.asarray(got.scale, np.float32)[:, None],
    )
    # A bfloat16 scale may be 2^-9 too small; 127.25 is then clipped to 127, still within a half.
    assert np.all(error <= 0.5 * scale * (1 + 1e-5))
    assert np.max(error / scale) > 0.49 and not np.any(error[0])


def test_fp8_is_off_by_a_sixteenth_at_most_and_less_than_a_thousandth_of_a_scale():
    x = numbers(200, 64)
    got = quantize(jnp.asarray(x), n_shared=1, dtype="float8_e4m3fn")
    error, scale = np.abs(np.asarray(dequantize(got)) - x), np.asarray(got.scale)[:, None]
    bound = np.maximum(np.abs(x) * 2.0**-4, scale * 2.0**-10)
    assert np.all(error <= bound * (1 + 1e-5))
    assert np.max(error[1:] / np.abs(x[1:]).max(axis=1, keepdims=True)) > 2.0**-6


def test_an_array_unpacks_to_itself_in_float32():
    x = jnp.asarray(numbers(3, 4), jnp.bfloat16)
    assert dequantize(x).dtype == jnp.float32
    np.testing.assert_array_equal(dequantize(x), x.astype(jnp.float32))


def test_the_leaves_of_a_quantized_array_may_be_anything():
    twice = jax.tree.map(lambda name: name * 2, Quantized("v", "s"))
    assert (twice.values, twice.scale) == ("vv", "ss")
