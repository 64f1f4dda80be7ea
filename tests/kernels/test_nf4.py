"""4-bit NormalFloat: its levels, the nearest level per value, and packed codes."""

from statistics import NormalDist

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.kernels.nf4 import (
    LEVELS,
    block_size,
    dequantize_nf4,
    dequantize_nf4_reference,
    quantize_nf4,
)
from sharding import make_mesh


def test_the_levels_are_quantiles_of_a_normal_distribution():
    # Appendix E of https://arxiv.org/abs/2305.14314: 8 levels above 0 and 7 below, divided by the
    # largest, at probabilities up to the mean of 1 - 1/32 and 1 - 1/30.
    quantile, top = NormalDist().inv_cdf, (1 - 1 / 32 + 1 - 1 / 30) / 2
    above = [quantile(p) for p in np.linspace(top, 0.5, 9)[:-1]]
    below = [-quantile(p) for p in np.linspace(top, 0.5, 8)[:-1]]
    np.testing.assert_allclose(np.sort([*below, 0, *above]) / quantile(top), LEVELS, atol=1e-6)


@pytest.mark.parametrize("shape", [(3, 128), (2, 4, 24)])
def test_every_value_becomes_the_nearest_level_times_the_largest_magnitude(shape, one_device):
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    x[0, ..., 0] = 0.0
    found = quantize_nf4(jnp.asarray(x), scale_dtype=jnp.float32)
    block = {128: 64, 24: 8}[shape[-1]]
    assert found.shape == shape and found.codes.shape == (*shape[:-1], shape[-1] // 2)
    blocks = x.reshape(-1, block)
    scale = np.abs(blocks).max(1, keepdims=True)
    levels = np.array(LEVELS, np.float32)
    nearest = np.abs(blocks[..., None] / scale[..., None] - levels).argmin(-1)
    want = (levels[nearest] * scale).reshape(shape)
    np.testing.assert_array_equal(dequantize_nf4(found, jnp.float32), want)
    np.testing.assert_array_equal(
        dequantize_nf4_reference(np.asarray(found.codes), np.asarray(found.scale)), want
    )
    again = quantize_nf4(jnp.asarray(want), scale_dtype=jnp.float32)
    np.testing.assert_array_equal(again.codes, found.codes)


def test_a_block_of_zeros_stays_zeros(one_device):
    zeros = quantize_nf4(jnp.zeros((2, 64)), scale_dtype=jnp.bfloat16)
    assert zeros.scale.dtype == jnp.bfloat16 and not np.any(dequantize_nf4(zeros, jnp.float32))


def test_a_sharded_axis_gives_the_codes_of_one_device():
    x = jax.random.normal(jax.random.key(1), (4, 256))
    with jax.set_mesh(make_mesh(fsdp=2, tensor=2)):
        sharded = jax.device_put(
            x, jax.NamedSharding(jax.sharding.get_mesh(), jax.P("fsdp", "tensor"))
        )
        found = quantize_nf4(sharded, scale_dtype=jnp.float32)
        values = dequantize_nf4(found, jnp.float32)
        assert jax.typeof(values).sharding.spec == jax.P("fsdp", "tensor")
        codes, values = np.asarray(found.codes), np.asarray(values)
    with jax.set_mesh(make_mesh()):
        alone = quantize_nf4(x, scale_dtype=jnp.float32)
        np.testing.assert_array_equal(codes, alone.codes)
        np.testing.assert_array_equal(values, dequantize_nf4(alone, jnp.float32))


def test_an_odd_axis_is_refused():
    assert [block_size(n) for n in (576, 80, 8, 2)] == [64, 16, 8, 2]
    with pytest.raises(ValueError, match="pairs of values, but an axis has 5; use int8"):
        block_size(5)
