"""Quantized products of training against their reference, and what they do to gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.kernels.quantized_matmul import (
    FORWARD,
    GRADIENT,
    quantized_matmul,
    quantized_matmul_reference,
    round_to,
)

KINDS = ("int8", "fp8")
OUT = jax.P(None, None, None)


def operands():
    """x [2, 3, 16], w [8, 16] and a gradient [2, 3, 8]; tokens and outputs of different sizes."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 3, 16)) * 10.0 ** np.arange(-1, 2)[:, None]
    w, grad = rng.normal(size=(8, 16)) * np.arange(1, 9)[:, None], rng.normal(size=(2, 3, 8))
    x[1, 2] = 0  # padding
    return (jnp.asarray(a, jnp.float32) for a in (x, w, grad))


@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_are_those_of_rounded_operands(kind, one_device):
    x, w, grad = operands()
    y, backward = jax.vjp(lambda x, w: quantized_matmul(x, w, kind, OUT), x, w)
    np.testing.assert_allclose(y, quantized_matmul_reference(x, w, kind), rtol=1e-5, atol=1e-5)
    # Per token and output, a quantized product differs from the exact one by some percent at most.
    sizes = np.linalg.norm(x, axis=-1)[..., None] * np.linalg.norm(w, axis=-1)
    assert np.abs(y - x @ w.T).max() > 0
    assert np.all(np.abs(y - x @ w.T) <= 0.03 * sizes)
    dx, dw = backward(grad)
    want = round_to(grad, GRADIENT[kind], -1) @ round_to(w, FORWARD[kind], 0)
    np.testing.assert_allclose(dx, want, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(dw, jnp.einsum("BTO,BTI->OI", grad, x), rtol=1e-5, atol=1e-5)


def test_bfloat16_operands_give_bfloat16(one_device):
    x, w, _ = (a.astype(jnp.bfloat16) for a in operands())
    y = quantized_matmul(x, w, "int8", OUT)
    want = quantized_matmul_reference(x, w, "int8")
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(y.astype(np.float32), want, rtol=2**-7, atol=1e-5)
