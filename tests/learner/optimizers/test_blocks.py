"""8-bit block-wise quantization against a table of codes built by sorting, and on a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jaxrl.learner.optimizers.blocks import (
    block_axes,
    check_blocks,
    decode,
    dequantize,
    encode,
    quantize,
)
from jaxrl.models.spec import ParamSpec
from sharding import TRAIN, make_mesh
from tests.learner.optimizers.twins import code_table

UP = ParamSpec((2, 64, 96), ("layers", "ffw", "w_embed"), "normal", "{layer}.up", (64, 96))
OUT = ParamSpec((96, 4, 32), ("w_embed", "heads", None), "normal", "o", (96, 128))


@pytest.mark.parametrize("signed", [True, False])
def test_the_codes_are_the_table_and_a_number_gets_the_nearest(signed):
    want = code_table(signed)
    kind = np.int8 if signed else np.uint8
    codes = np.arange(256).astype(np.uint8).view(kind)
    np.testing.assert_allclose(np.sort(decode(jnp.asarray(codes), signed=signed)), want, rtol=1e-6)
    np.testing.assert_array_equal(
        encode(decode(jnp.asarray(codes), signed=signed), signed=signed), codes
    )
    rng = np.random.default_rng(0)
    x = (10.0 ** rng.uniform(-7.5, 0, 4000) * (rng.choice([-1, 1], 4000) if signed else 1)).clip(-1)
    nearest = want[np.abs(x[:, None] - want).argmin(1)]
    if not signed:  # a second moment above 0 does not become 0
        nearest = np.where(nearest == 0, want[1], nearest)
    got = decode(encode(jnp.asarray(x, jnp.float32), signed=signed), signed=signed)
    np.testing.assert_allclose(got, nearest, rtol=1e-6)


def moments(spec: ParamSpec) -> np.ndarray:
    rng = np.random.default_rng(1)
    return (rng.standard_normal(spec.shape) * rng.lognormal(size=spec.shape)).astype(np.float32)


@pytest.mark.thorough
@pytest.mark.parametrize(("spec", "axes"), [(UP, (1, 2)), (OUT, (0, 2))])
def test_blocks_have_their_own_scale_and_are_the_same_on_a_mesh(spec, axes):
    assert block_axes(spec) == axes
    x = moments(spec)
    one = quantize(jnp.asarray(x), axes, signed=True)
    assert one.codes.shape == x.shape and one.scale.shape == tuple(
        n // 16 if d in axes else n for d, n in enumerate(x.shape)
    )
    scale = np.repeat(np.repeat(one.scale, 16, axes[0]), 16, axes[1])
    # the widest gap between codes is 0.9 / 64 of the block's largest magnitude, at its top
    assert (np.abs(dequantize(one, axes) - x) <= scale * 0.0071).all()
    mesh = make_mesh(fsdp=2, tensor=2)
    with jax.set_mesh(mesh):
        sharding = NamedSharding(mesh, TRAIN.spec(*spec.axes))
        got = jax.jit(lambda x: quantize(x, axes, signed=True))(jax.device_put(x, sharding))
        assert got.codes.sharding.is_equivalent_to(sharding, x.ndim)
        assert got.scale.sharding.is_equivalent_to(sharding, x.ndim)
        back = jax.jit(lambda blocks: dequantize(blocks, axes))(got)
    np.testing.assert_array_equal(got.codes, one.codes)
    np.testing.assert_array_equal(got.scale, one.scale)
    np.testing.assert_allclose(jax.device_get(back), dequantize(one, axes), rtol=1e-6)


def test_vectors_small_matrices_and_the_token_embedding_stay_float32():
    keep = [
        ParamSpec((4096,), ("w_embed",), "ones", "norm", (4096,)),
        ParamSpec((63, 64), ("ffw", "w_embed"), "normal", "small", (63, 64)),
        ParamSpec((1, 8192), (None, "w_embed"), "zeros", "score.weight", (1, 8192)),
        ParamSpec((64, 64), ("vocab", "w_embed"), "normal", "m.embed_tokens.weight", (64, 64)),
    ]
    assert [block_axes(spec) for spec in keep] == [None] * 4


def test_shards_that_blocks_do_not_divide_are_an_error_before_device_work():
    odd = ParamSpec((100, 64), ("ffw", "w_embed"), "normal", "odd", (100, 64))
    wide = pytest.raises(ValueError, match=r"up has 96 .* 8 devices of mesh\.fsdp on axis 2")
    with jax.set_mesh(make_mesh(fsdp=8)), wide:
        check_blocks([UP], TRAIN)
    with jax.set_mesh(make_mesh(fsdp=2)):
        check_blocks([UP, OUT], TRAIN)
        with pytest.raises(ValueError, match=r"odd has 100 elements on axis 0.*'bfloat16'"):
            check_blocks([odd], TRAIN)
