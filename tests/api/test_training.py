import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.api.lanes import AdamParams
from jaxrl.api.room import AdapterRoom
from jaxrl.api.training import TrainedAdapter, Trainer, start_moments
from jaxrl.config.keys import RunConfig
from jaxrl.models.config import LoRA, uniform_decoder
from jaxrl.models.decoder import decoder_specs
from sharding.rules import TRAIN


def adamw(w, gradients, p: AdamParams):
    """torch.optim.AdamW with clipping of the norm, in float64."""
    m, v = np.zeros_like(w), np.zeros_like(w)
    for t, g in enumerate(gradients, start=1):
        norm = np.sqrt((g**2).sum())
        if p.grad_clip_norm and norm > p.grad_clip_norm:
            g = g * p.grad_clip_norm / norm
        m = p.beta1 * m + (1 - p.beta1) * g
        v = p.beta2 * v + (1 - p.beta2) * g**2
        direction = m / (1 - p.beta1**t) / (np.sqrt(v / (1 - p.beta2**t)) + p.eps)
        w = w - p.learning_rate * (direction + p.weight_decay * w)
    return w


LORA = LoRA(1, 1.0, targets=())


@pytest.fixture(params=[LORA, None], ids=["adapter", "all weights"])
def adapter(request):
    weights = [jnp.asarray([0.5, -0.25, 1.0], jnp.float32)]
    return TrainedAdapter(request.param, weights, start_moments(weights))


DECODER = uniform_decoder("llama", L=1, D=8, N=2, K=1, H=4, F=12, V=10, max_len=8)


def trainer(lora: LoRA | None) -> Trainer:
    """For steps, which read no weights of the base."""
    room = AdapterRoom(DECODER, lora, TRAIN)
    return Trainer(RunConfig(), decoder_specs(DECODER), room, 1, jnp.float32)


def step(adapter, params):
    """The metrics of a step. Raises its error."""
    [result] = trainer(adapter.lora).optim_steps([adapter], [params])
    if isinstance(result, ValueError):
        raise result
    return result


def test_steps_are_those_of_adamw(adapter):
    rng = np.random.default_rng(0)
    gradients = rng.standard_normal((3, 3))
    params = AdamParams(0.1, 0.8, 0.9, 1e-3, weight_decay=0.05, grad_clip_norm=1.0)
    wanted = adamw(np.array([0.5, -0.25, 1.0]), gradients, params)
    for g in gradients:
        adapter.gradient = [jnp.asarray(g, jnp.float32)]
        metrics = step(adapter, params)
        assert metrics["optim/grad_norm"] == pytest.approx(np.linalg.norm(g), rel=1e-5)
        assert adapter.gradient is None
    np.testing.assert_allclose(adapter.weights[0], wanted, rtol=1e-5)
    assert adapter.n_steps == 3


def test_steps_together_are_those_alone_bit_for_bit():
    rng, n = np.random.default_rng(1), 3
    params = [AdamParams(10.0**-i, weight_decay=0.1 * i, grad_clip_norm=float(i)) for i in range(n)]
    gradients = rng.standard_normal((2, n, 5, 7)).astype(np.float32)
    gradients[1, 2, 0, 0] = np.inf  # its step fails, and the others' do not

    def run(together: bool) -> list[TrainedAdapter]:
        starts = np.random.default_rng(2).standard_normal((n, 5, 7)).astype(np.float32)
        found = [[jnp.asarray(w)] for w in starts]
        adapters = [TrainedAdapter(LORA, w, start_moments(w)) for w in found]
        for step in gradients:
            for adapter, g in zip(adapters, step, strict=True):
                adapter.gradient = [jnp.asarray(g)]
            if together:
                trainer(LORA).optim_steps(adapters, params)
            else:
                for one, its_params in zip(adapters, params, strict=True):
                    trainer(LORA).optim_steps([one], [its_params])
        return adapters

    for one, other in zip(run(together=True), run(together=False), strict=True):
        for a, b in zip(
            jax.tree.leaves((one.weights, one.moments)),
            jax.tree.leaves((other.weights, other.moments)),
            strict=True,
        ):
            np.testing.assert_array_equal(a, b)
    assert [one.n_steps for one in run(together=True)] == [2, 2, 1]


def test_a_gradient_that_is_not_finite_changes_nothing(adapter):
    before = np.array(adapter.weights[0])
    adapter.gradient = [jnp.asarray([1.0, math.nan, 0.0], jnp.float32)]
    with pytest.raises(ValueError, match="not finite"):
        step(adapter, AdamParams())
    np.testing.assert_array_equal(adapter.weights[0], before)
    assert (adapter.n_steps, adapter.gradient) == (0, None)


def test_a_step_needs_a_gradient(adapter):
    with pytest.raises(ValueError, match="call forward_backward before"):
        step(adapter, AdamParams())
