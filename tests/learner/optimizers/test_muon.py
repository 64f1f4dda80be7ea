"""Muon against NumPy twins of its references."""

# Unions in the types of optax and jax, without the fields that are read here.
# pyright: reportArgumentType=false
# pyright: reportAttributeAccessIssue=false
# pyright: reportCallIssue=false
# pyright: reportIndexIssue=false
# pyright: reportOperatorIssue=false

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.config.keys import LearnerConfig
from jaxrl.config.keys.optimizer import MuonOptions
from jaxrl.learner.optimizer import make_optimizer
from jaxrl.learner.optimizers.muon import is_hidden_matrix, scale_by_muon
from jaxrl.models.decoder import decoder_specs
from jaxrl.models.spec import ParamSpec, is_spec
from tests.learner.optimizers.twins import numpy_newton_schulz
from tests.learner.tiny_policy import MODEL
from tests.models.resized import resized

TALL = ParamSpec((24, 8), ("ffw", "w_embed"), "normal", "model.layers.0.up.weight", (24, 8))
WIDE = ParamSpec((8, 24), ("w_embed", "ffw"), "normal", "model.layers.0.down.weight", (8, 24))
NORM = ParamSpec((8,), ("w_embed",), "ones", "model.norm.weight", (8,))
SPECS = {"tall": TALL, "wide": WIDE}


def gradients(step: int) -> dict[str, jax.Array]:
    rng = np.random.default_rng(step)
    return {k: jnp.asarray(rng.standard_normal(s.shape), jnp.float32) for k, s in SPECS.items()}


def reference_factor(scale: str, rows: int, cols: int) -> float:
    """As in https://github.com/KellerJordan/Muon, and in https://arxiv.org/abs/2502.16982."""
    return max(1, rows / cols) ** 0.5 if scale == "shape" else 0.2 * max(rows, cols) ** 0.5


@pytest.mark.parametrize(("scale", "nesterov"), [("shape", True), ("rms", True), ("rms", False)])
def test_three_steps_are_those_of_the_reference(scale, nesterov):
    muon = scale_by_muon(SPECS, MuonOptions(scale=scale, nesterov=nesterov))
    state = muon.init(jax.tree.map(jnp.zeros_like, gradients(0)))
    momentum = {name: np.zeros(spec.shape) for name, spec in SPECS.items()}
    for step in range(3):
        grads = gradients(step)
        updates, state = muon.update(grads, state)
        for name, g in jax.device_get(grads).items():
            momentum[name] += (1 - 0.95) * (g - momentum[name])  # lerp
            direction = g + 0.95 * (momentum[name] - g) if nesterov else momentum[name]
            want = numpy_newton_schulz(direction, 5) * reference_factor(scale, *g.shape)
            np.testing.assert_allclose(updates[name], want, rtol=0, atol=2e-5)


def test_the_rms_scale_gives_updates_of_the_size_of_adamw():
    muon = scale_by_muon(SPECS, MuonOptions())
    updates, _ = muon.update(gradients(0), muon.init(gradients(0)))
    for update in updates.values():  # 0.2 in the paper, up to the spread of the singular values
        assert 0.15 < float(jnp.sqrt(jnp.mean(update**2))) < 0.25


@pytest.mark.parametrize("stacked", [False, True])
def test_embedding_head_norms_and_biases_are_updated_by_adamw(stacked):
    model = resized(MODEL, L=2, stacked=stacked, tied=False)
    specs = jax.tree.leaves(decoder_specs(model), is_leaf=is_spec)
    names = {spec.hf for spec in specs if not is_hidden_matrix(spec)}
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"} <= names
    rest = names - {"model.embed_tokens.weight", "lm_head.weight"}
    assert all("norm" in name or name.endswith("bias") for name in rest)


def test_other_tensors_take_adamws_step():
    specs = {**SPECS, "norm": NORM}
    grads = gradients(0) | {"norm": jnp.linspace(-1, 1, 8)}
    params = jax.tree.map(jnp.ones_like, grads)
    steps = {}
    for name in ("adamw", "muon"):
        cfg = LearnerConfig(optimizer=name, lr=0.1, weight_decay=0.5)
        transform = make_optimizer(cfg, 10, specs).transform
        steps[name] = transform.update(grads, transform.init(params), params)[0]
    np.testing.assert_allclose(steps["muon"]["norm"], steps["adamw"]["norm"], rtol=1e-6)
    assert not np.allclose(steps["muon"]["tall"], steps["adamw"]["tall"])
