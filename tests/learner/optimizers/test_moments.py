"""AdamW, Lion and Muon with moments in bfloat16 and 8 bits, against NumPy twins."""

# Unions in the types of optax and jax, without the fields that are read here.
# pyright: reportArgumentType=false
# pyright: reportAttributeAccessIssue=false
# pyright: reportCallIssue=false
# pyright: reportIndexIssue=false

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl.config.keys import LearnerConfig
from jaxrl.learner.optimizer import make_optimizer
from jaxrl.learner.optimizers.blocks import QuantizedBlocks, quantize
from jaxrl.learner.optimizers.moments import round_stochastically, store_moments
from jaxrl.models.spec import ParamSpec
from tests.learner.optimizers.twins import code_table

SHAPE = (64, 96)
SPECS = {
    "w": ParamSpec(SHAPE, ("ffw", "w_embed"), "normal", "model.layers.0.up", SHAPE),
    "b": ParamSpec((96,), ("w_embed",), "zeros", "b", (96,)),
}
LR, B1, B2, EPS = 0.1, 0.9, 0.999, 1e-8


def gradients(step: int):
    rng = np.random.default_rng(step)
    return {k: jnp.asarray(rng.standard_normal(s.shape), jnp.float32) for k, s in SPECS.items()}


def blockwise(x: np.ndarray, signed: bool) -> np.ndarray:
    """Each block of 16 x 16 rounded to the nearest code times its largest magnitude."""
    table, out = code_table(signed), np.zeros_like(x)
    for i in range(0, SHAPE[0], 16):
        for j in range(0, SHAPE[1], 16):
            block = x[i : i + 16, j : j + 16]
            scale = np.abs(block).max()
            code = np.abs((block / scale)[..., None] - table).argmin(-1)
            code += (table[code] == 0) & (block > 0) & (not signed)
            out[i : i + 16, j : j + 16] = table[code] * scale
    return out


@pytest.mark.thorough
def test_adamw_with_8_bit_moments_is_that_of_the_paper():
    """https://arxiv.org/abs/2110.02861: the step is exact, its moments are stored quantized."""
    cfg = LearnerConfig(lr=LR, weight_decay=0.0, b1=B1, b2=B2, eps=EPS, moment_dtype="int8")
    transform = make_optimizer(cfg, 10, SPECS).transform
    update = jax.jit(transform.update)
    state = transform.init(gradients(0))
    m, v = np.zeros(SHAPE), np.zeros(SHAPE)
    for k in range(1, 5):
        grads = gradients(k)
        updates, state = update(grads, state, grads)
        g = np.asarray(grads["w"], np.float64)
        m, v = B1 * m + (1 - B1) * g, B2 * v + (1 - B2) * g * g
        want = -LR * (m / (1 - B1**k)) / (np.sqrt(v / (1 - B2**k)) + EPS)
        # rounding of float32 moves single numbers to the next code
        wrong = ~np.isclose(updates["w"], want, rtol=1e-3, atol=1e-6)
        assert wrong.mean() < 2e-3
        m, v = blockwise(m, signed=True), blockwise(v, signed=False)
    assert (
        isinstance(state[0].mu["w"], QuantizedBlocks) and state[0].mu["w"].codes.dtype == jnp.int8
    )
    assert state[0].nu["w"].codes.dtype == jnp.uint8 and state[0].nu["b"].dtype == jnp.float32


@pytest.mark.parametrize("name", ["adamw", "lion", "muon"])
@pytest.mark.parametrize(("dtype", "n_bytes"), [("float32", 4), ("bfloat16", 2), ("int8", 1)])
def test_moments_have_the_bytes_of_their_dtype(name, dtype, n_bytes):
    cfg = LearnerConfig(optimizer=name, moment_dtype=dtype)
    state = jax.eval_shape(make_optimizer(cfg, 10, SPECS).transform.init, gradients(0))
    n_moments = {"adamw": 2, "lion": 1, "muon": 1}[name]
    size = SHAPE[0] * SHAPE[1]
    sizes = {leaf.shape: leaf.dtype.itemsize for leaf in jax.tree.leaves(state)}
    assert sizes[SHAPE] == n_bytes
    leaves = [x for x in jax.tree.leaves(state) if x.ndim == 2]
    held = sum(x.size * x.dtype.itemsize for x in leaves)
    scales = 4 * size // 256 if dtype == "int8" else 0
    assert held == n_moments * (size * n_bytes + scales)


def test_moments_start_as_stored_zeros_without_their_quantization():
    """XLA folds the quantization of constants, 20 seconds for 2.7 million numbers."""
    adam = store_moments(optax.scale_by_adam(), "int8", SPECS)
    state, zeros = adam.init(gradients(0)), jnp.zeros(SHAPE)
    for name, signed in (("mu", True), ("nu", False)):
        want = quantize(zeros, (0, 1), signed=signed)
        jax.tree.map(np.testing.assert_array_equal, getattr(state, name)["w"], want)
    assert "reduce_max" not in str(jax.make_jaxpr(adam.init)(gradients(0)))


@pytest.mark.thorough
def test_a_bfloat16_second_moment_follows_small_changes():
    """Rounded to nearest, 1 - b2 = 0.001 is less than half a unit and the moment never falls."""
    adam = store_moments(optax.scale_by_adam(b1=B1, b2=B2), "bfloat16", SPECS)
    state = adam.init(gradients(0))
    full = jax.tree.map(lambda m: jnp.full(m.shape, 1.0, m.dtype), state.nu)
    state = state._replace(nu=full)
    zeros = jax.tree.map(jnp.zeros_like, gradients(0))
    step = jax.jit(lambda s: adam.update(zeros, s)[1])
    for _ in range(200):
        state = step(state)
    assert state.nu["w"].dtype == jnp.bfloat16
    mean = float(jnp.mean(state.nu["w"].astype(jnp.float32)))
    assert mean == pytest.approx(0.999**200, rel=0.01)  # 0.8186; the spread of the mean is 0.1 %


def test_stochastic_rounding_has_the_right_mean_and_keeps_what_bfloat16_has():
    x = jnp.asarray([1.0 + 2.0**-9, 1.5, 0.0])  # a quarter of the way to the next number
    keys = jax.random.split(jax.random.key(0), 4000)
    rounded = jax.vmap(lambda key: round_stochastically(x, key))(keys).astype(jnp.float32)
    np.testing.assert_allclose(jnp.mean(rounded, 0), x, rtol=0, atol=2e-4)
    assert set(np.unique(rounded[:, 0])) == {1.0, 1.0 + 2.0**-7}
    assert set(np.unique(rounded[:, 1])) == {1.5} and not np.any(rounded[:, 2])
