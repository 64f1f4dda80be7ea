"""The objective against what verl, TRL and prime-rl compute themselves from the same responses.

scripts/make_golden_policy.py has called their functions; golden/policy.json has the results.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.algorithms.losses.covariance import covariances, select_largest
from jaxrl.algorithms.losses.value_loss import value_loss
from jaxrl.config.keys import AlgorithmConfig
from jaxrl.learner.policy_objective import accepted_tokens, importance_weights, token_loss_sums
from jaxrl.trainer.phases.advantage import add_advantages
from tests.algorithms.responses import (
    BATCH,
    GOLDEN,
    IN_RESPONSE,
    LENGTHS,
    MASK,
    MICRO_BATCHES,
    ROWS,
    N,
    T,
    config,
    placed,
    sample,
    summed,
    token_values,
)

# Their value is ratio · A, ours sg(ratio) · A · logp, with the same gradient.
OTHER_VALUES = ("prime-rl default",)


def names(cases):
    return [f"{i} {case['function']}" for i, case in enumerate(cases)]


def batches_of(keys):
    """The micro-batches, with the tokens selected that a loss by covariance selects."""
    if "cov_fraction" not in keys:
        return MICRO_BATCHES
    inside = MASK > 0
    rows = np.zeros_like(MASK)
    cov = covariances(BATCH.logp[inside], BATCH.advantages[inside])
    rows[inside] = select_largest(cov, cov_fraction=keys["cov_fraction"])
    return [
        batch.replace(selected=jnp.asarray(selected == 1))
        for batch, selected in zip(MICRO_BATCHES, placed(rows), strict=True)
    ]


@pytest.mark.thorough
@pytest.mark.parametrize("case", GOLDEN["losses"], ids=names(GOLDEN["losses"]))
def test_losses_and_gradients(case):
    keys = case["keys"]
    only_kl = case["function"].startswith("verl kl_penalty")
    cfg = config(**keys)

    def total(logp, batch):
        if only_kl:
            batch = batch.replace(advantages=jnp.zeros_like(batch.advantages))
        loss, sums = token_loss_sums(logp, jnp.zeros_like(logp), None, batch, cfg=cfg)
        return loss, sums.weight

    loss, grad = summed(total, batches_of(keys), cfg.algorithm.aggregation)
    if case["function"] not in OTHER_VALUES:
        np.testing.assert_allclose(loss, case["loss"], rtol=1e-5, atol=1e-6)
    want = np.array(case["gradient"])
    np.testing.assert_allclose(grad, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("case", GOLDEN["advantages"], ids=names(GOLDEN["advantages"]))
def test_advantages(case):
    whole = case["function"] == "verl optimal_token_baseline"  # which is for single turns
    norms = 1.0 - 2.0 * np.exp(ROWS["old_logp"]) + ROWS["collisions"]
    samples = [with_fields(i, norms, whole) for i in range(N)]
    cfg = AlgorithmConfig(**case["keys"])
    penalties = [np.zeros(n, np.float32) for n in LENGTHS]
    scores, baselines = ROWS["scores"], ROWS["baselines"]
    found = add_advantages(samples, scores, cfg, penalties=penalties, baselines=baselines)
    rows = np.stack([np.pad(s.advantages, (0, T - len(s.tokens))) for s in found])
    mask = IN_RESPONSE if whole else MASK
    np.testing.assert_allclose(rows, np.array(case["values"]) * mask, rtol=1e-5, atol=1e-6)


def with_fields(i, norms, whole):
    """Response i with what the estimators read; `whole`: without observations."""
    inside = slice(LENGTHS[i])
    one = sample(i)
    return dataclasses.replace(
        one,
        values=ROWS["values"][i, inside].astype(np.float32),
        score_norms=norms[i, inside].astype(np.float32),
        loss_mask=np.ones(LENGTHS[i], bool) if whole else one.loss_mask,
    )


@pytest.mark.parametrize("case", GOLDEN["corrections"], ids=names(GOLDEN["corrections"]))
def test_corrections_and_rejections(case):
    function = accepted_tokens if "rejection" in case["keys"] else importance_weights
    found = token_values(function, config(**case["keys"]))
    np.testing.assert_allclose(found, np.array(case["values"]), rtol=1e-5)
    assert len(np.unique(found[MASK > 0])) > 1, "the bounds decide something"


def test_the_value_loss():
    case = GOLDEN["value"]
    returns, old = (jnp.asarray(ROWS[name], jnp.float32) for name in ("returns", "old_values"))

    def total(values):
        return (value_loss(values, old, returns, clip=case["clip"]) * MASK).sum() / MASK.sum()

    loss, grad = jax.value_and_grad(total)(jnp.asarray(ROWS["values"], jnp.float32))
    np.testing.assert_allclose(loss, case["loss"], rtol=1e-5)
    np.testing.assert_allclose(grad, np.array(case["gradient"]), rtol=1e-5, atol=1e-7)
