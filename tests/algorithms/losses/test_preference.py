"""Preference losses by hand, their direction, and their equivalent policy gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.algorithms.losses.preference import (
    advantages,
    aot,
    aot_unpaired,
    apo_down,
    apo_zero,
    apo_zero_unpaired,
    bco_pair,
    bradley_terry,
    centering,
    discopop,
    dpo,
    exo_pair,
    hinge,
    ipo,
    kto,
    kto_labelled,
    nca_pair,
    robust,
    sppo_hard,
)

CHOSEN, REJECTED = jnp.array([1.0, -2.0]), jnp.array([-1.0, 1.0])
LOSSES = {
    "dpo": lambda c, r: dpo(c, r, beta=0.5),
    "cdpo": lambda c, r: dpo(c, r, beta=0.5, label_smoothing=0.1),
    "ipo": lambda c, r: ipo(c, r, beta=0.1),
    "bradley_terry": lambda c, r: bradley_terry(c, r, margin=jnp.array([0.5, 0.0])),
    "kto": lambda c, r: kto(c, r, beta=0.5, kl=0.2, chosen_weight=1.0, rejected_weight=2.0),
    "apo_zero_unpaired": lambda c, r: apo_zero_unpaired(
        c, r, beta=0.5, chosen_weight=1.0, rejected_weight=2.0
    ),
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


# r = (1, -2) and (-1, 1), β = 0.5: margins 2 and -3, β margins 1 and -1.5
HAND_NUMBERS = {
    # max(0, 1 - 1), max(0, 1 + 1.5)
    "hinge": (hinge(CHOSEN, REJECTED, beta=0.5), [0.0, 2.5]),
    # 0.9 and 0.1 of -log σ(±1), -log σ(±1.5), / 0.8: (0.9 * 0.313262 - 0.1 * 1.313262) / 0.8
    # and (0.9 * 1.701413 - 0.1 * 0.201413) / 0.8
    "robust": (robust(CHOSEN, REJECTED, beta=0.5, label_smoothing=0.1), [0.188262, 1.888913]),
    # p = 0.731059, 0.268941 and 0.182426, 0.817574 to 0.9, 0.1: Σ p log(p / q)
    "exo_pair": (exo_pair(CHOSEN, REJECTED, beta=0.5, label_smoothing=0.1), [0.114082, 1.426704]),
    # -log σ(0.5) + (0.974077 + 0.474077) / 2; -log σ(-1) + (0.313262 + 0.974077) / 2
    "nca_pair": (nca_pair(CHOSEN, REJECTED, beta=0.5), [1.198154, 1.956931]),
    # -log σ(0.5) - log σ(0.5); -log σ(-1) - log σ(-0.5)
    "bco_pair": (bco_pair(CHOSEN, REJECTED, beta=0.5), [0.948154, 2.287339]),
    # 1 / 2β = 1: (1 - 1)² + (-1 + 1)²; (-2 - 1)² + (1 + 1)²
    "sppo_hard": (sppo_hard(CHOSEN, REJECTED, beta=0.5), [0.0, 13.0]),
    # 1 - σ(0.5) + σ(-0.5); 1 - σ(-1) + σ(0.5)
    "apo_zero": (apo_zero(CHOSEN, REJECTED, beta=0.5), [0.755081, 1.353518]),
    # (1 - σ(0.5)) / 2 + σ(-0.5); (1 - σ(-1)) / 2 + σ(0.5)
    "apo_zero_unpaired": (LOSSES["apo_zero_unpaired"](CHOSEN, REJECTED), [0.566311, 0.987989]),
    # σ(0.5) + 1 - σ(1); σ(-1) + 1 - σ(-1.5)
    "apo_down": (apo_down(CHOSEN, REJECTED, beta=0.5), [0.891401, 1.086516]),
    # s = σ(1 / 1), σ(-1.5 / 1): (1 - s) 0.313262 + s exp(-1); (1 - s) 1.701413 + s exp(1.5)
    "discopop": (discopop(CHOSEN, REJECTED, beta=0.5, discopop_tau=1.0), [0.353190, 2.208607]),
    # margins (2, -3) sorted -3, 2; those of the reference (1, -1) sorted -1, 1: -2, 1 times 0.5
    "aot": (
        aot(
            CHOSEN,
            REJECTED,
            jnp.array([1.0, 0.0]),
            jnp.array([0.0, 1.0]),
            beta=0.5,
            label_smoothing=0.0,
        ),
        [1.313262, 0.474077],
    ),
    # chosen -2, 1 and rejected -1, 1: -1, 0 times 0.5
    "aot_unpaired": (
        aot_unpaired(CHOSEN, REJECTED, beta=0.5, label_smoothing=0.0),
        [0.974077, 0.693147],
    ),
    # (1 - 1)², (-2 + 1)²
    "centering": (centering(CHOSEN, REJECTED), [0.0, 1.0]),
}


@pytest.mark.parametrize("name", HAND_NUMBERS)
def test_losses_by_hand(name):
    found, wanted = HAND_NUMBERS[name]
    np.testing.assert_allclose(found, wanted, atol=2e-6)


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
