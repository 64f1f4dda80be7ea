"""Every configured preference loss: against TRL's own trainers, and its direction.

golden/preference.json is written by scripts/make_golden_preferences.py.
"""

import dataclasses
import inspect
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.algorithms.losses.preference import (
    bco,
    bco_labelled,
    bradley_terry,
    centering,
    kto_labelled,
)
from jaxrl.algorithms.losses.preference_table import (
    LOSSES,
    PairLogps,
    divergence_scores,
    length_weights,
    pair_weights,
    weighted_losses,
)
from jaxrl.config import choices
from jaxrl.config.keys import PreferenceConfig

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "preference.json").read_text())
LONGEST = max(map(len, GOLDEN["policy"]))
CASES = [(", ".join(f"{k}={v}" for k, v in case["keys"].items()), case) for case in GOLDEN["cases"]]


def config(keys):
    return PreferenceConfig(**{k: tuple(v) if isinstance(v, list) else v for k, v in keys.items()})


def padded(rows):
    return np.stack([np.pad(row, (0, LONGEST - len(row))) for row in rows]).astype(np.float32)


def arrays(rows):
    return [np.array(row, np.float32) for row in rows]


def mean_loss(policy, cfg):
    """The mean loss of pairs from the logprobs of each token [2N, T], chosen completions first."""
    n_tokens = np.array([len(row) for row in GOLDEN["policy"]])
    weights = padded(length_weights(n_tokens, cfg.ld_alpha))
    reference = padded(GOLDEN["reference"]) * cfg.has_reference
    logps = PairLogps(
        ((policy - reference) * weights).sum(1),
        jnp.asarray((reference * weights).sum(1)),
        jnp.asarray(n_tokens, jnp.float32),
        jnp.zeros(()),
        weights=jnp.asarray(pair_weights(arrays(GOLDEN["policy"]), arrays(GOLDEN["collisions"])))
        if cfg.weighted
        else 1.0,
    )
    return weighted_losses(logps, cfg).mean()


@pytest.mark.parametrize("case", [case for _, case in CASES], ids=[name for name, _ in CASES])
def test_losses_and_gradients_are_those_of_trl(case):
    cfg = config(case["keys"])
    loss, slopes = jax.value_and_grad(mean_loss)(jnp.asarray(padded(GOLDEN["policy"])), cfg)
    np.testing.assert_allclose(loss, case["loss"], rtol=1e-5)
    np.testing.assert_allclose(slopes, padded(case["gradient"]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", GOLDEN["labelled"]["cases"], ids=lambda case: case["keys"]["loss"])
def test_losses_of_single_completions_are_those_of_trl(case):
    cfg, given = config(case["keys"]), GOLDEN["labelled"]
    policy, reference = np.array(given["mismatched"], np.float32)
    kl = max(float((policy - reference).mean()), 0.0) if cfg.loss == "kto" else 0.0
    assert cfg.loss != "kto" or kl > 0
    mask = padded([np.ones(len(row)) for row in GOLDEN["policy"]])

    def loss(policy):
        ratio = ((policy - padded(GOLDEN["reference"])) * mask).sum(1)
        weights = dict(chosen_weight=cfg.chosen_weight, rejected_weight=cfg.rejected_weight)
        desirable = jnp.array(given["labels"])
        return kto_labelled(ratio, desirable, beta=cfg.beta, kl=kl, **weights).mean()

    found, slopes = jax.value_and_grad(loss)(jnp.asarray(padded(GOLDEN["policy"])))
    np.testing.assert_allclose(found, case["loss"], rtol=1e-5)
    np.testing.assert_allclose(slopes, padded(case["gradient"]), rtol=1e-5, atol=1e-6)


def test_every_loss_has_golden_numbers():
    names = {name for case in GOLDEN["cases"] for name in config(case["keys"]).names}
    names |= {case["keys"]["loss"] for case in GOLDEN["labelled"]["cases"]}
    assert set(LOSSES) == names | {"bco"}  # TRL 1.16 has no trainer of it


def test_bco_by_hand():
    # β (r - z) of the chosen answer: 0.5 (2 - 1) = 0.5, -log σ(0.5) = 0.474077; of the other
    # 0.5 (-1 - 1) = -1, -log σ(1) = 0.313262, times 2
    weights = dict(chosen_weight=1.0, rejected_weight=2.0)
    pair = jnp.array([2.0]), jnp.array([-1.0])
    found = bco(*pair, 1.0, beta=0.5, **weights)
    np.testing.assert_allclose(found, [0.5 * (0.474077 + 2 * 0.313262)], rtol=1e-5)
    labels = jnp.array([True, False])
    each = bco_labelled(jnp.concatenate(pair), labels, beta=0.5, shift=1.0, **weights)
    np.testing.assert_allclose(each, [0.474077, 2 * 0.313262], rtol=1e-5)


def test_weights_of_pairs_by_hand():
    # π = 1/2 and Σ π² = 1/2 at both tokens: 1; π = 1/4 and Σ π² = 1/2: 1/2
    half = np.full(2, np.log(0.5), np.float32)
    quarter = np.full(3, np.log(0.25), np.float32)
    found = pair_weights([half, quarter], [half, np.full(3, np.log(0.5), np.float32)])
    np.testing.assert_allclose(found, [0.5], rtol=1e-6)


@pytest.mark.parametrize("case", GOLDEN["rewards"]["cases"])
def test_the_loss_of_rewards_is_that_of_trl(case):
    scores, keys = jnp.asarray(GOLDEN["rewards"]["scores"]), case["keys"]
    margin = keys["margin_weight"] * jnp.asarray(GOLDEN["rewards"]["margins"])

    def loss(scores):
        ranking = bradley_terry(*scores, margin=margin)
        return (ranking + keys["center_coef"] * centering(*scores)).mean()

    found, slopes = jax.value_and_grad(loss)(scores)
    np.testing.assert_allclose(found, case["loss"], rtol=1e-5)
    np.testing.assert_allclose(slopes.ravel(), case["gradient"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "row"), LOSSES.items())
def test_a_row_names_the_arguments_of_its_function(name, row):
    parameters = inspect.signature(row.function).parameters.values()
    keywords = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    required = {p.name for p in keywords if p.default is p.empty}
    assert list(row.inputs) == [p.name for p in parameters if p not in keywords]
    assert required <= set(row.hyper_parameters) <= {p.name for p in keywords}
    fields = {field.name for field in dataclasses.fields(PreferenceConfig)}
    assert set(row.hyper_parameters) <= fields
    smoothed = "label_smoothing" in row.hyper_parameters
    assert smoothed == (name in choices.SMOOTHED_LOSSES)


def test_the_table_has_the_names_of_the_config():
    assert tuple(LOSSES) == choices.PREFERENCE_TERMS


def pairs(ratio, reference=-3.0):
    """Two pairs of completions with 2 and 4 tokens each."""
    ratio = jnp.asarray(ratio)
    lens = jnp.array([2.0, 4.0, 2.0, 4.0])
    return PairLogps(ratio, jnp.full(len(ratio), reference), lens, jnp.float32(0.0))


@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_favours_chosen_completions(name):
    """Near the reference; discopop is not monotonic there."""
    smoothing = {"exo_pair": 0.01, "robust": 0.1}.get(name, 0.0)
    cfg = dataclasses.replace(PreferenceConfig(), label_smoothing=smoothing, loss=name)
    ratio = jnp.array([-0.3, 0.2, 0.1, -0.2]) + (0.0 if cfg.has_reference else -6.0)
    if name == "discopop":
        ratio = ratio + jnp.array([-9.0, -9.0, 0.0, 0.0])  # margins of about -9 β = -0.9
    inputs = pairs(ratio, -3.0 if cfg.has_reference else 0.0)
    slopes = jax.grad(lambda r: weighted_losses(dataclasses.replace(inputs, ratio=r), cfg).sum())(
        inputs.ratio
    )
    chosen, rejected = np.split(np.asarray(slopes), 2)
    if name == "apo_down":  # both fall, the rejected one as least as much
        assert (chosen >= -1e-6).all() and (rejected > chosen).all()
    else:
        assert (chosen < 0).all() and ((rejected > 0).all() or name == "sft")


def test_a_sum_of_losses_has_the_sum_of_their_values():
    # β = 0.1, r = (1, 2) and (-1, 0): dpo -log σ(0.2) = 0.5981 for both; hinge 0.8 for both
    inputs = pairs([1.0, 2.0, -1.0, 0.0])
    cfg = PreferenceConfig(more_losses=("hinge",), loss_weights=(2.0, 0.5))
    np.testing.assert_allclose(weighted_losses(inputs, cfg), 2 * 0.598139 + 0.4, rtol=1e-5)


def test_divergence_scores_by_hand():
    # u = π / π_ref = 4: 1 - 1/4, log(8 / 5), (4^(-1/2) - 1) / (-1/2) = 1, log 4
    ratio = jnp.log(jnp.array([4.0, 1.0]))
    wanted = {"forward_kl": 0.75, "js": np.log(1.6), "alpha": 1.0, "reverse_kl": np.log(4.0)}
    for name, value in wanted.items():
        found = divergence_scores(ratio, name, 0.5)
        np.testing.assert_allclose(found, [value, 0.0], atol=1e-6, err_msg=name)
    far = jax.grad(lambda r: divergence_scores(r, "forward_kl", 0.5).sum())(jnp.array([-200.0]))
    assert np.isfinite(far).all()


def test_tokens_beyond_the_shorter_completion_have_the_weight_alpha():
    # pairs of 1 and 3, and of 2 and 2 tokens
    found = length_weights(np.array([1, 2, 3, 2]), 0.25)
    assert [row.tolist() for row in found] == [[1], [1, 1], [1, 0.25, 0.25], [1, 1]]
