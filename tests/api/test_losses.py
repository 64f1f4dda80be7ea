"""The losses against numpy, by the formulas of https://tinker-docs.thinkingmachines.ai/losses."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.api.losses import per_token_loss, read_loss, read_samples
from jaxrl.api.messages import Datum
from jaxrl.data.packing import empty_batch
from jaxrl.http.errors import RequestError

RNG = np.random.default_rng(0)
LOGP, SAMPLED = -RNG.random((1, 8)) * 3, -RNG.random((1, 8)) * 3
A, MASK = RNG.standard_normal((1, 8)), np.array([[1, 1, 0, 1, 0, 0, 1, 1]])
RATIO = np.exp(LOGP - SAMPLED)
CLIPPED = np.clip(RATIO, 0.8, 1.2)
CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
# The ratio of a sequence: the geometric mean over the masked tokens.
SEQUENCE = np.exp(((LOGP - SAMPLED) * MASK).sum() / MASK.sum())


def inside(ratio):
    """Where the objective min(r A, clip(r) A) is r A, and so has a gradient."""
    return ratio * A <= np.clip(ratio, 0.8, 1.2) * A


CASES = {  # name: (options, losses, gradients with respect to logp)
    "cross_entropy": ({}, -A * LOGP, -A),
    "importance_sampling": ({}, -RATIO * A, -RATIO * A),
    "ppo": ({}, -np.minimum(RATIO * A, CLIPPED * A), -RATIO * A * inside(RATIO)),
    "cispo": ({}, -CLIPPED * LOGP * A, -CLIPPED * A),
    "dro": (
        {"beta": 0.05},
        -(LOGP * A - 0.5 * 0.05 * (LOGP - SAMPLED) ** 2),
        -A + 0.05 * (LOGP - SAMPLED),
    ),
    "gspo": (
        CLIP,
        -np.minimum(SEQUENCE * A, np.clip(SEQUENCE, 0.8, 1.2) * A),
        -SEQUENCE * A * inside(SEQUENCE),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_those_of_the_documentation(name):
    given, losses, gradients = CASES[name]
    batch = dataclasses.replace(
        empty_batch(1, 8),
        advantages=jnp.asarray(A, jnp.float32),
        rollout_logp=jnp.asarray(SAMPLED, jnp.float32),
        selected=jnp.asarray(MASK, jnp.float32),
        segments=jnp.ones((1, 8), jnp.int32),
    )

    def total(logp, chosen):
        per_token = per_token_loss(logp, batch, chosen)
        return per_token.sum(), per_token

    program = jax.jit(jax.grad(total, has_aux=True))  # the loss and its options are data of it
    gradient, per_token = program(jnp.asarray(LOGP, jnp.float32), read_loss(name, given))
    np.testing.assert_allclose(per_token, losses, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(gradient, gradients, rtol=1e-5, atol=1e-6)


def test_a_loss_that_is_not_chosen_adds_nothing_where_it_would_overflow():
    # r = exp(200) overflows in importance_sampling, whose gradient would be inf; cispo clips it.
    batch = dataclasses.replace(
        jax.tree.map(jnp.asarray, empty_batch(1, 1)),
        advantages=jnp.ones((1, 1)),
        rollout_logp=jnp.full((1, 1), -200.0),
    )
    chosen = jax.tree.map(jnp.asarray, read_loss("cispo", {}))
    gradient = jax.grad(lambda logp: per_token_loss(logp, batch, chosen).sum())(jnp.zeros((1, 1)))
    np.testing.assert_allclose(gradient, [[-1.2]], rtol=1e-6)


def datum(n: int = 3, **tensors) -> Datum:
    tensors = {"target_tokens": np.arange(n)} | tensors
    chunks = (np.arange(n, dtype=np.int32),)
    return Datum(chunks, {k: v for k, v in tensors.items() if v is not None})


def read(name: str, *data: Datum):
    return read_samples(name, data, n_vocab=10, max_len=5)


def test_weights_are_one_where_they_are_left_out():
    [sample] = read("cross_entropy", datum())
    assert sample.advantages is not None and sample.advantages.tolist() == [1, 1, 1]
    assert (sample.prompt_tokens.tolist(), sample.tokens.tolist()) == ([0], [1, 2, 2])


F = np.ones(3, np.float32)


@pytest.mark.parametrize(
    ("name", "one", "message"),
    [
        ("cross_entropy", datum(6), "send 1 to 5"),
        ("cross_entropy", datum(0), "send 1 to 5"),
        ("cross_entropy", datum(target_tokens=None), "no target_tokens"),
        ("cross_entropy", datum(target_tokens=np.arange(2)), "one per token"),
        ("cross_entropy", datum(target_tokens=np.ones((3, 2), int)), "one per token"),
        ("cross_entropy", datum(target_tokens=F), "send int64"),
        ("cross_entropy", datum(target_tokens=np.array([0, 1, 10])), "outside of 0 to 9"),
        ("cross_entropy", datum(weights=np.arange(3)), "send float32"),
        ("cross_entropy", datum(logprobs=F), "'logprobs', which cross_entropy does not read"),
        ("ppo", datum(logprobs=F), "no advantages"),
        ("ppo", datum(logprobs=F * np.nan, advantages=F), "not finite"),
        ("gspo", datum(logprobs=F, advantages=F), "no sequence_ratio_mask"),
        ("stable_reinforce", datum(), "not supported; set one of"),
    ],
)
def test_a_wrong_datum_is_named(name, one, message):
    with pytest.raises(RequestError, match=message):
        read(name, one)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("ppo", {"beta": 1.0}, "'beta'.* is unknown: ppo has clip_low_threshold"),
        ("cispo", {"clip_low_threshold": -0.1}, "at least 0"),
        ("dro", {}, "needs loss_fn_config with beta"),
        ("gspo", {"clip_low_threshold": 0.9}, "needs loss_fn_config with clip_high_threshold"),
    ],
)
def test_wrong_options_are_named(name, options, message):
    with pytest.raises(RequestError, match=message):
        read_loss(name, options)
