"""Value and gradient of every policy loss and correction are independent of packing and mesh.

Tests of jaxrl/learner/policy_objective.py.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.config.choices import POLICY_LOSSES
from jaxrl.config.keys import AlgorithmConfig
from jaxrl.data.packing import gather, pack
from jaxrl.learner.policy_objective import Coefs, kl_weights, token_loss_sums
from jaxrl.learner.xla import compiler_options
from sharding import make_mesh
from sharding.rules import TRAIN
from tests.learner.tiny_policy import QUICK_COMPILE, batches, rollouts, run_config

ROLLOUTS = [dataclasses.replace(r, selected=np.arange(len(r.tokens)) % 3 == 0) for r in rollouts()]
# Logprobs of the current and the old policy, so far from the engine's that every clip is active.
RNG = np.random.default_rng(7)
LOGPS = [
    r.rollout_logp + 0.5 * RNG.standard_normal(len(r.tokens)).astype(np.float32) for r in ROLLOUTS
]
OLDS = [
    r.rollout_logp + 0.2 * RNG.standard_normal(len(r.tokens)).astype(np.float32) for r in ROLLOUTS
]

LOSSES = {name: dict(policy_loss=name) for name in POLICY_LOSSES}
CORRECTIONS = {
    "token_tis": dict(correction="token_tis", correction_high=1.1),
    "seq_tis": dict(correction="seq_tis", correction_high=1.5),
    "icepop": dict(correction="icepop", correction_low=0.8, correction_high=1.25),
    "seq_icepop": dict(correction="seq_icepop", correction_low=0.5, correction_high=2.0),
    "seq_max_k3": dict(rejection="seq_max_k3", rejection_max=0.1),
    "seq_mean_binary_kl": dict(rejection="seq_mean_binary_kl", rejection_max=0.01),
    "top entropy": dict(top_entropy=0.3),
    "off-policy sequences": dict(off_policy_threshold=0.05),
    "seq_mean_k1": dict(rejection="seq_mean_k1", rejection_low=0.95, rejection_high=1.1),
    "gspo, token_tis, seq_mean_k1": dict(
        policy_loss="gspo",
        correction="token_tis",
        correction_high=1.1,
        rejection="seq_mean_k1",
        rejection_low=0.95,
        rejection_high=1.1,
    ),
}
LAYOUTS = {
    "one micro-batch": (dict(row_len=32, token_budget=512), {}),
    "long rows in two micro-batches": (dict(row_len=128, token_budget=256), {}),
    "2 x 2 x 2 devices": (
        dict(row_len=32, token_budget=128, n_ranks=4),
        dict(replica=2, fsdp=2, tensor=2),
    ),
}


def place(packed, values, pad):
    """One [B, T] array per micro-batch with each rollout's values at its response tokens."""
    arrays = []
    for micro in packed:
        array = np.full(micro.batch.tokens.shape, pad, np.float32)
        for p in micro.spans:
            array[p.row, p.start : p.start + p.length] = values[p.item]
        arrays.append(array)
    return arrays


def loss_and_gradient(cfg, packing, mesh_sizes, coefs=None, samples=ROLLOUTS):
    """(loss, gradient of every rollout's tokens, mean metrics), with extreme values at padding."""
    shape = packing["token_budget"] // packing["row_len"], packing["row_len"]
    packed = pack(samples, shapes=(shape,), align=8, n_ranks=packing.get("n_ranks", 1))
    assert [p.batch.tokens.shape for p in packed] == [
        b.tokens.shape for b in batches(samples, **packing)
    ]
    sums, grads = 0, []
    mesh = make_mesh(**mesh_sizes)
    with jax.set_mesh(mesh):
        sharding = jax.sharding.NamedSharding(mesh, TRAIN.spec("batch", "time"))

        @functools.partial(jax.jit, compiler_options=compiler_options(QUICK_COMPILE, "cpu"))
        def both(logp, batch):
            def total(logp):
                return token_loss_sums(logp, -logp, None, batch, coefs, cfg=cfg)

            (_, sums), grad = jax.value_and_grad(total, has_aux=True)(logp)
            return sums, grad

        for micro, logp, old in zip(
            packed, place(packed, LOGPS, 50.0), place(packed, OLDS, -70.0), strict=True
        ):
            filled = micro.batch.replace(old_logp=old, ref_logp=old)
            batch = jax.device_put((logp, filled), sharding)
            found, grad = jax.device_get(both(*batch))
            assert not grad[micro.batch.mask == 0].any()
            sums, grads = found if not grads else sums + found, [*grads, grad]
    weight = sums.weight
    means = {name: value / n for name, (value, n) in sums.means.items()}
    return sums.losses["loss/total"] / weight, [g / weight for g in gather(grads, packed)], means


@functools.cache
def numbers(case, layout):
    keys = dict(aggregation="seq_mean_token_mean", old_logp="recompute") | (
        LOSSES.get(case) or CORRECTIONS[case]
    )
    return loss_and_gradient(run_config(**keys), *LAYOUTS[layout])


# A loss of single tokens, and two that read whole responses.
DEFAULT = [
    (case, "2 x 2 x 2 devices") for case in ("ppo_clip", "gmpo", "gspo, token_tis, seq_mean_k1")
]
CASES = [*itertools.product([*LOSSES, *CORRECTIONS], [*LAYOUTS][1:])]


@pytest.mark.parametrize(
    ("case", "layout"),
    [pytest.param(*x, marks=[pytest.mark.thorough] * (x not in DEFAULT)) for x in CASES],
)
def test_losses_do_not_depend_on_packing_micro_batches_and_devices(case, layout):
    got, want = numbers(case, layout), numbers(case, "one micro-batch")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)
    assert np.concatenate(want[1]).any()


@pytest.mark.parametrize("name", ["ppo_clip", "gspo", "gspo_token", "gmpo", "clip_cov"])
def test_clip_fraction_counts_the_tokens_without_gradient(name):
    _, grads, means = numbers(name, "one micro-batch")
    share = np.mean(np.concatenate(grads) == 0)
    assert 0 < share < 1
    np.testing.assert_allclose(means["loss/clip_fraction"], share, rtol=1e-5)


@pytest.mark.parametrize("name", ["policy_gradient", "cispo", "sapo", "kl_cov"])
def test_losses_without_a_clip_have_a_gradient_at_every_token(name):
    _, _, means = numbers(name, "one micro-batch")
    assert means["loss/clip_fraction"] == 0


def test_gspo_has_the_loss_of_a_slow_reference():
    got, _, _ = numbers("gspo", "one micro-batch")
    losses = []
    for r, logp, old in zip(ROLLOUTS, LOGPS, OLDS, strict=True):
        s, a = np.exp(np.mean(logp - old)), r.advantages[0]
        losses.append(max(-s * a, -np.clip(s, 0.8, 1.2) * a))
    np.testing.assert_allclose(got, np.mean(losses), rtol=1e-5)


def test_rejected_and_truncated_tokens_are_counted():
    _, _, means = numbers("token_tis", "one micro-batch")
    ratio = np.concatenate(
        [np.exp(old - r.rollout_logp) for r, old in zip(ROLLOUTS, OLDS, strict=True)]
    )
    np.testing.assert_allclose(
        means["mismatch/truncated_fraction"], np.mean(ratio > 1.1), rtol=1e-5
    )
    np.testing.assert_allclose(
        means["mismatch/weight_mean"], np.minimum(ratio, 1.1).mean(), rtol=1e-5
    )
    _, _, means = numbers("icepop", "one micro-batch")
    outside = np.mean((ratio < 0.8) | (ratio > 1.25))
    np.testing.assert_allclose(means["mismatch/rejected_fraction"], outside, rtol=1e-5)


# The same tokens, sampled with a filter that kept 60 to 100 % of the probability.
FILTERED = [
    dataclasses.replace(
        r,
        behavior_logp=(r.rollout_logp - np.log(RNG.uniform(0.6, 1.0, len(r.tokens)))).astype("f"),
    )
    for r in ROLLOUTS
]
BEHAVIOR = np.concatenate([r.behavior_logp for r in FILTERED])


def test_ratios_from_the_engine_use_the_distribution_that_was_sampled_from():
    cfg = run_config(old_logp="rollout", clip_low=0.9, clip_high=9.0)
    got, _, _ = loss_and_gradient(cfg, *LAYOUTS["one micro-batch"], samples=FILTERED)
    ratio = np.exp(np.concatenate(LOGPS) - BEHAVIOR)
    a = np.concatenate([r.advantages for r in ROLLOUTS])
    want = np.maximum(-ratio * a, -np.clip(ratio, 0.1, 10.0) * a).mean()
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_corrections_use_the_distribution_that_was_sampled_from_and_the_mismatch_does_not():
    cfg = run_config(old_logp="recompute", **CORRECTIONS["token_tis"])
    _, _, means = loss_and_gradient(cfg, *LAYOUTS["one micro-batch"], samples=FILTERED)
    old = np.concatenate(OLDS)
    np.testing.assert_allclose(
        means["mismatch/weight_mean"], np.minimum(np.exp(old - BEHAVIOR), 1.1).mean(), rtol=1e-5
    )
    gap = np.abs(old - np.concatenate([r.rollout_logp for r in ROLLOUTS]))
    np.testing.assert_allclose(means["mismatch/logp_diff_mean"], gap.mean(), rtol=1e-5)


def test_the_mismatch_is_that_of_the_policy_at_the_start_of_the_step():
    """Not of the policy that the updates of the step have moved, if the start is scored."""
    _, _, means = numbers("ppo_clip", "one micro-batch")
    d = np.concatenate(
        [old - r.rollout_logp for r, old in zip(ROLLOUTS, OLDS, strict=True)]
    )  # the current logprobs are LOGPS
    np.testing.assert_allclose(means["mismatch/logp_diff_mean"], np.abs(d).mean(), rtol=1e-5)
    np.testing.assert_allclose(means["mismatch/kl"], (np.exp(d) - 1 - d).mean(), rtol=1e-4)


def test_a_token_is_rejected_that_one_of_several_masks_rejects():
    single = dict(policy_loss="policy_gradient", old_logp="recompute", rejection="token_k1")
    single |= dict(rejection_low=0.9, rejection_high=1.15)
    cfg = run_config(**single, more_rejections=("token_k2?max=0.005", "seq_max_k2?max=0.05"))
    got, _, _ = loss_and_gradient(cfg, *LAYOUTS["one micro-batch"])
    alone = loss_and_gradient(run_config(**single), *LAYOUTS["one micro-batch"])[0]
    sums, weight, n_kept = 0.0, 0, []
    for r, logp, old in zip(ROLLOUTS, LOGPS, OLDS, strict=True):
        d = old - r.rollout_logp
        masks = [(np.exp(d) >= 0.9) & (np.exp(d) <= 1.15), d**2 / 2 <= 0.005]
        masks.append(np.full(len(d), (d**2 / 2).max() <= 0.05))
        accepted = np.all(masks, axis=0)
        sums, weight = sums + (accepted * -r.advantages * logp).sum(), weight + accepted.sum()
        n_kept.append([mask.sum() for mask in masks])
    assert len(set(map(tuple, np.array(n_kept).T))) == 3  # three different masks
    np.testing.assert_allclose(got, sums / weight, rtol=1e-5)
    assert abs(got - alone) > 1e-4


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean"])
@pytest.mark.parametrize("scope", ["all", "policy_loss"])
def test_rejected_tokens_leave_all_terms_or_the_policy_loss_alone(scope, aggregation):
    bounds = dict(rejection_low=0.9, rejection_high=1.15, rejection_scope=scope)
    cfg = run_config(
        policy_loss="policy_gradient",
        old_logp="recompute",
        aggregation=aggregation,
        rejection="token_k1",
        kl_coef=0.1,
        entropy_coef=0.01,
        **bounds,
    )
    got, _, means = loss_and_gradient(cfg, *LAYOUTS["one micro-batch"])
    sums, weight, kls, n_kept = 0.0, 0, [], 0
    for r, logp, old in zip(ROLLOUTS, LOGPS, OLDS, strict=True):
        ratio = np.exp(old - r.rollout_logp)
        accepted = (ratio >= 0.9) & (ratio <= 1.15)
        counted = accepted if scope == "all" else np.ones(len(logp), bool)
        kl = np.expm1(old - logp) - (old - logp)  # the reference is the old policy
        loss = accepted * -r.advantages * logp + counted * (0.1 * kl + 0.01 * logp)  # entropy -logp
        n, kls, n_kept = counted.sum(), [*kls, kl[counted]], n_kept + accepted.sum()
        sums += loss.sum() if aggregation == "token_mean" else loss.sum() / max(n, 1)
        weight += n if aggregation == "token_mean" else n > 0
    assert 0 < n_kept < sum(len(logp) for logp in LOGPS)
    np.testing.assert_allclose(got, sums / weight, rtol=1e-5)
    np.testing.assert_allclose(means["loss/kl"], np.concatenate(kls).mean(), rtol=1e-5)


def test_leaving_flat_groups_out_changes_no_metric():
    n = len(ROLLOUTS) // 2
    flat = [dataclasses.replace(r, advantages=0 * r.advantages) for r in ROLLOUTS[n:]]
    means = []
    for drop, samples in ((True, ROLLOUTS[:n]), (False, ROLLOUTS[:n] + flat)):
        cfg = run_config(old_logp="recompute", drop_flat_groups=drop)
        means.append(loss_and_gradient(cfg, *LAYOUTS["one micro-batch"], samples=samples)[2])
    assert means[0]["loss/entropy"] > 0 and 0 < means[0]["loss/clip_fraction"] < 1
    assert means[0] == pytest.approx(means[1], rel=1e-5)


def test_tokens_of_less_entropy_have_no_gradient_and_stay_in_the_denominator():
    _, grads, _ = numbers("top entropy", "one micro-batch")
    _, every, _ = numbers("ppo_clip", "one micro-batch")
    for r, grad, whole in zip(ROLLOUTS, grads, every, strict=True):
        np.testing.assert_allclose(grad, np.where(r.selected, whole, 0), rtol=1e-5, atol=1e-8)


def test_an_importance_weight_has_no_gradient():
    """On policy, old_logp is the current logprob; the weight must stop its gradient."""
    cfg = run_config(correction="token_tis", correction_high=9.0, old_logp="auto")
    _, grads, _ = loss_and_gradient(cfg, *LAYOUTS["one micro-batch"])
    n = sum(len(r.tokens) for r in ROLLOUTS)
    for r, logp, grad in zip(ROLLOUTS, LOGPS, grads, strict=True):
        weight = np.minimum(np.exp(logp - r.rollout_logp), 9.0)
        np.testing.assert_allclose(grad, -weight * r.advantages / n, rtol=1e-4, atol=1e-7)


def test_with_the_engines_logprobs_as_old_ones_weights_and_masks_follow_the_current_policy():
    cfg = run_config(
        policy_loss="policy_gradient",
        correction="token_tis",
        correction_high=9.0,
        correction_floor=0.9,
        off_policy_threshold=0.05,
        old_logp="rollout",
    )
    _, grads, means = loss_and_gradient(cfg, *LAYOUTS["one micro-batch"])
    n, n_masked = sum(len(r.tokens) for r in ROLLOUTS), 0
    for r, logp, grad in zip(ROLLOUTS, LOGPS, grads, strict=True):
        drift = logp - r.rollout_logp
        masked = r.advantages[0] < 0 and -drift.mean() > 0.05
        n_masked += masked * len(r.tokens)
        want = -np.clip(np.exp(drift), 0.9, 9.0) * r.advantages * (not masked) / n
        np.testing.assert_allclose(grad, want, rtol=1e-4, atol=1e-7)
    assert n_masked
    np.testing.assert_allclose(means["mismatch/rejected_fraction"], n_masked / n, rtol=1e-5)


def test_weights_are_divided_by_their_mean_over_the_mini_batch():
    loss, grads, _ = numbers("token_tis", "one micro-batch")
    keys = dict(aggregation="seq_mean_token_mean", correction_normalize=True)
    cfg = run_config(**keys, **CORRECTIONS["token_tis"])
    halved = Coefs(kl=0.0, entropy=0.0, mean_weight=2.0)
    half, halves, _ = loss_and_gradient(cfg, *LAYOUTS["one micro-batch"], halved)
    np.testing.assert_allclose(half, loss / 2, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b / 2, rtol=1e-6), halves, grads)


def test_clamped_tokens_have_no_gradient_and_are_counted():
    keys = dict(policy_loss="sapo", old_logp="recompute", log_ratio_clamp=0.5)
    cfg = run_config(**keys, kl="k2", kl_coef=1.0, kl_clamp=0.02)
    _, grads, means = loss_and_gradient(cfg, *LAYOUTS["one micro-batch"])
    ratio = np.abs(np.concatenate([a - b for a, b in zip(LOGPS, OLDS, strict=True)]))
    # k2 = d^2 / 2 above .02: |d| > .2; the reference has the old logprobs
    np.testing.assert_allclose(means["loss/clamped_fraction"], np.mean(ratio > 0.5), rtol=1e-5)
    np.testing.assert_allclose(means["loss/kl_clamped_fraction"], np.mean(ratio > 0.2), rtol=1e-5)
    np.testing.assert_array_equal(np.concatenate(grads) == 0, ratio > 0.5)
    assert means["loss/kl"] <= 0.02


@pytest.mark.parametrize("name", ["k1+", "k3+", "abs+"])
def test_a_kl_with_a_plus_has_its_value_and_the_gradient_of_k2(name):
    found = {}
    for kl in (name, name[:-1], "k2"):
        cfg = run_config(kl=kl, kl_coef=0.5, old_logp="recompute")
        [batch] = batches(ROLLOUTS, row_len=32, token_budget=512)
        [packed] = pack(ROLLOUTS, shapes=((16, 32),), align=8, n_ranks=1)
        [logp], [old] = place([packed], LOGPS, 0.0), place([packed], OLDS, 0.0)
        batch = jax.tree.map(jnp.asarray, batch.replace(old_logp=old, ref_logp=old))

        def total(logp, batch=batch, cfg=cfg):
            return token_loss_sums(logp, -logp, None, batch, cfg=cfg)

        (_, sums), grad = jax.value_and_grad(total, has_aux=True)(jnp.asarray(logp))
        found[kl] = float(sums.means["loss/kl"][0]), np.asarray(grad)
    np.testing.assert_allclose(found[name][0], found[name[:-1]][0], rtol=1e-5)
    np.testing.assert_allclose(found[name][1], found["k2"][1], rtol=1e-5, atol=1e-6)


def test_the_kl_is_weighted_by_the_truncated_ratio_of_the_token_or_of_the_response():
    logp = jnp.log(jnp.array([[0.2, 0.6, 0.5, 0.1]]))
    inputs = {
        "logp": logp,
        "old_logp": jnp.log(jnp.array([[0.1, 0.1, 0.5, 0.4]])),
        "mask": jnp.ones((1, 4)),
        "segments": jnp.array([[1, 1, 2, 2]]),
    }

    def weights(level):
        cfg = AlgorithmConfig(kl_ratio_max=3.0, kl_ratio_level=level)
        return kl_weights(inputs, cfg)

    # ratios 2, 6, 1, 0.25; of the responses 12 and 0.25
    np.testing.assert_allclose(weights("token"), [[2.0, 3.0, 1.0, 0.25]], rtol=1e-5)
    np.testing.assert_allclose(weights("response"), [[3.0, 3.0, 0.25, 0.25]], rtol=1e-5)
    cfg = AlgorithmConfig(kl_ratio_max=3.0)
    slope = jax.grad(lambda x: kl_weights(inputs | {"logp": x}, cfg).sum())(logp)
    np.testing.assert_array_equal(slope, 0.0)
