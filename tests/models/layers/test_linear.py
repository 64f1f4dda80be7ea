"""The gradient of a linear map: its values, and a bad fusion that it prevents on CPU."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.models.layers.linear import materialize_gradient


def test_materializing_changes_neither_value_nor_gradient():
    x = jnp.linspace(-2.0, 3.0, 12).reshape(3, 4)

    def loss(f, x):
        return jnp.sum(jax.nn.silu(f(x)))

    plain, materialized = (
        jax.jit(jax.value_and_grad(loss, argnums=1), static_argnums=0)(f, x)
        for f in (lambda x: x, materialize_gradient)
    )
    jax.tree.map(np.testing.assert_array_equal, plain, materialized)


def test_no_transposing_copy_computes_the_activation():
    x, w = jnp.ones((2, 64, 32)), jnp.ones((48, 32))

    def loss(w, materialize):
        return jnp.sum(jax.nn.silu(materialize(jnp.einsum("BTI,OI->BTO", x, w))))

    def transposing_exponentials(materialize) -> int:
        hlo = jax.jit(jax.grad(lambda w: loss(w, materialize))).lower(w).compile().as_text()
        fusions = hlo.split("\n}\n")
        return sum("exponential(%" in f and "transpose(%" in f for f in fusions)

    assert transposing_exponentials(lambda y: y) > 0  # XLA still has the problem
    assert transposing_exponentials(materialize_gradient) == 0


def test_other_platforms_get_no_barrier():
    grad = jax.jit(jax.grad(lambda x: jnp.sum(materialize_gradient(x) ** 2)))
    text = {
        platform: grad.trace(jnp.ones(4)).lower(lowering_platforms=(platform,)).as_text()
        for platform in ("cpu", "tpu")
    }
    assert "optimization_barrier" in text["cpu"]
    assert "optimization_barrier" not in text["tpu"]
