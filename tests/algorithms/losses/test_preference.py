"""Preference losses by hand, their direction, and their equivalent policy gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.algorithms.losses.preference import (
    advantages,
    bradley_terry,
    dpo,
    ipo,
    kto,
    kto_labelled,
)

CHOSEN, REJECTED = jnp.array([1.0, -2.0]), jnp.array([-1.0, 1.0])
LOSSES = {
    "dpo": lambda c, r: dpo(c, r, beta=0.5),
    "cdpo": lambda c, r: dpo(c, r, beta=0.5, label_smoothing=0.1),
    "ipo": lambda c, r: ipo(c, r, beta=0.1),
    "bradley_terry": lambda c, r: bradley_terry(c, r, margin=jnp.array([0.5, 0.0])),
    "kto": lambda c, r: kto(c, r, beta=0.5, kl=0.2, chosen_weight=1.0, rejected_weight=2.0),
}


def sigmoid(x):
    return 1.0 / (1.0 + np.exp(-x))


def test_dpo_by_hand():
    # margins 2 and -3, times 0.5
    want = [-np.log(sigmoid(1.0)), -np.log(sigmoid(-1.5))]
    np.testing.assert_allclose(LOSSES["dpo"](CHOSEN, REJECTED), want, rtol=1e-6)
    smooth = [0.9 * a - 0.1 * np.log(sigmoid(b)) for a, b in zip(want, (-1.0, 1.5), strict=True)]
    np.testing.assert_allclose(LOSSES["cdpo"](CHOSEN, REJECTED), smooth, rtol=1e-6)


def test_bradley_terry_by_hand():
    # margins 2 - 0.5 and -3 - 0
    want = [-np.log(sigmoid(1.5)), -np.log(sigmoid(-3.0))]
    np.testing.assert_allclose(LOSSES["bradley_terry"](CHOSEN, REJECTED), want, rtol=1e-6)


def test_ipo_by_hand():
    # 1 / (2 * 0.1) = 5: (2 - 5)^2, (-3 - 5)^2
    np.testing.assert_allclose(LOSSES["ipo"](CHOSEN, REJECTED), [9.0, 64.0], rtol=1e-6)


def test_kto_by_hand():
    good = 1.0 - sigmoid(0.5 * (np.array([1.0, -2.0]) - 0.2))
    bad = 2.0 * (1.0 - sigmoid(0.5 * (0.2 - np.array([-1.0, 1.0]))))
    np.testing.assert_allclose(LOSSES["kto"](CHOSEN, REJECTED), 0.5 * (good + bad), rtol=1e-6)
    ratio, desirable = jnp.concatenate([CHOSEN, REJECTED]), jnp.array([True, True, False, False])
    each = kto_labelled(ratio, desirable, beta=0.5, kl=0.2, chosen_weight=1.0, rejected_weight=2.0)
    np.testing.assert_allclose(each, [*good, *bad], rtol=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_chosen_completions_become_likelier_and_rejected_ones_less_likely(name):
    _, chosen, rejected = advantages(LOSSES[name], CHOSEN, REJECTED)
    assert (chosen > 0).all() and (rejected < 0).all()


def test_cdpo_and_ipo_lower_margins_that_are_too_large():
    far = jnp.array([30.0])
    for name in ("cdpo", "ipo"):
        _, chosen, rejected = advantages(LOSSES[name], far, -far)
        assert (chosen < 0).all() and (rejected > 0).all(), name


@pytest.mark.parametrize("name", LOSSES)
def test_a_policy_gradient_has_the_gradient_of_the_loss(name):
    """Completions of three tokens under a toy policy: logits [completion, token, vocabulary]."""
    logits = jax.random.normal(jax.random.key(0), (4, 3, 5))
    tokens = jax.random.randint(jax.random.key(1), (4, 3, 1), 0, 5)
    ref = jnp.array([-4.0, -5.0, -4.5, -5.5])

    def logp(logits):
        return jnp.take_along_axis(jax.nn.log_softmax(logits), tokens, -1)[..., 0]

    def ratio(logits):
        return logp(logits).sum(-1) - ref

    direct = jax.grad(lambda z: LOSSES[name](ratio(z)[:2], ratio(z)[2:]).sum())(logits)
    weights = jnp.concatenate(advantages(LOSSES[name], ratio(logits)[:2], ratio(logits)[2:])[1:])
    surrogate = jax.grad(lambda z: -(weights[:, None] * logp(z)).sum())(logits)
    np.testing.assert_allclose(surrogate, direct, rtol=1e-5, atol=1e-7)
