"""Adafactor against optax.adafactor, which treats every array as one tensor."""

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

from jaxrl.config.keys.optimizer import AdafactorOptions
from jaxrl.learner.optimizers.adafactor import scale_by_adafactor
from jaxrl.models.spec import ParamSpec

OPTIONS = AdafactorOptions(min_dim_size_to_factor=8)
SPECS = {
    "q": ParamSpec(
        (2, 4, 4, 8), ("layers", "heads", None, "w_embed"), "normal", "{layer}", (16, 8)
    ),
    "o": ParamSpec(
        (2, 8, 4, 4), ("layers", "w_embed", "heads", None), "normal", "{layer}", (8, 16)
    ),
    "norm": ParamSpec((2, 16), ("layers", "w_embed"), "ones", "{layer}", (16,)),
    "small": ParamSpec((2, 4, 16), ("layers", None, None), "normal", "{layer}", (4, 16)),
}


def trees(seed: int):
    rng = np.random.default_rng(seed)
    return {k: jnp.asarray(rng.standard_normal(s.shape), jnp.float32) for k, s in SPECS.items()}


def as_files(tree, layer: int):
    """The tensors of a layer with their shapes in the file."""
    return {name: np.asarray(tree[name])[layer].reshape(s.hf_shape) for name, s in SPECS.items()}


@pytest.mark.thorough
@pytest.mark.parametrize("scaled", [True, False])
def test_each_tensor_of_stacked_layers_is_updated_as_by_optax(scaled):
    options = AdafactorOptions(min_dim_size_to_factor=8, multiply_by_parameter_scale=scaled)
    ours = scale_by_adafactor(SPECS, options)
    theirs = optax.adafactor(1.0, min_dim_size_to_factor=8, multiply_by_parameter_scale=scaled)
    params = jax.tree.map(lambda p: 0.1 * p, trees(0))
    update = jax.jit(ours.update)
    state, states = ours.init(params), [theirs.init(as_files(params, i)) for i in range(2)]
    for step in range(1, 4):
        grads = jax.tree.map(lambda g, step=step: g * step, trees(step))
        updates, state = update(grads, state, params)
        for i in range(2):
            want, states[i] = theirs.update(as_files(grads, i), states[i], as_files(params, i))
            got = as_files(updates, i)
            for name in SPECS:  # optax's updates have the sign of a step
                np.testing.assert_allclose(-got[name], want[name], rtol=2e-5, atol=1e-7)


def test_matrices_keep_one_number_per_row_and_column():
    state = scale_by_adafactor(SPECS, OPTIONS).init(trees(0))
    shapes = lambda tree: {k: v.shape for k, v in tree.items() if isinstance(v, jnp.ndarray)}  # noqa: E731
    assert shapes(state.rows) == {"q": (2, 4, 4), "o": (2, 8)}
    assert shapes(state.cols) == {"q": (2, 8), "o": (2, 4, 4)}
    assert shapes(state.full) == {"norm": (2, 16), "small": (2, 4, 16)}
