"""The parts of the objective: hand numbers, and the sum of single objectives on any layout.

Tests of `part_sums`, and of the update with algorithm.parts.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.config.choices import GIVEN_PARTS
from jaxrl.data.packing import empty_batch, gather, pack
from jaxrl.learner.loss import loss_gradients, policy_objective
from jaxrl.learner.parts import part_sums
from jaxrl.learner.policy_objective import Coefs, token_loss_sums
from jaxrl.learner.step import put_batch
from jaxrl.learner.xla import compiler_options
from jaxrl.runtime.flat_program import unflatten
from jaxrl.trainer.phases.mini_batches import policy_weight
from jaxrl.trainer.phases.parts import part_factors, sampled_parts
from sharding import PIPELINE, TRAIN, make_mesh
from tests.learner.test_pipeline_1f1b import STACKED, host_weights
from tests.learner.test_prefixes import SAMPLES as GROUPS
from tests.learner.test_update import LAYOUTS, ONE, assert_same
from tests.learner.tiny_policy import (
    MOE,
    QUICK_COMPILE,
    batches,
    new_state,
    programs,
    put_params,
    rollouts,
    run_config,
)
from tests.marks import graded

PARTS = (
    "observations?weight=0.1",
    "demonstrations?weight=0.5&aggregation=seq_mean_token_mean",
)
LOSS = dict(aggregation="seq_mean_token_mean", old_logp="rollout", entropy_coef=0.01)


def episodes():
    """10 responses with the tokens of an environment in the middle, and 6 demonstrations."""
    found = []
    for i, sample in enumerate(rollouts()):
        if i >= 10:
            none = np.zeros(len(sample.tokens), bool)
            parts = np.where(np.arange(len(sample.tokens)) % 3 < 2, 2, 0).astype(np.int32)
            found.append(
                dataclasses.replace(
                    sample, loss_mask=none, parts=parts, advantages=None, rollout_logp=None
                )
            )
            continue
        own = np.ones(len(sample.tokens), bool)
        own[2:5] = False
        parts = np.where(own, 0, 1).astype(np.int32)
        found.append(dataclasses.replace(sample, loss_mask=own, parts=parts))
    return found


SAMPLES = episodes()


def gradient(cfg, packing, mesh_sizes=None, samples=SAMPLES):
    """(gradient of the loss, metrics) of an update on a layout."""
    algorithm, update = cfg.algorithm, programs(cfg)[1]
    policy = [s for s in samples if s.n_loss_tokens]
    coefs = part_factors(samples, policy_weight(policy, algorithm), 0, algorithm)
    coefs = Coefs(algorithm.kl_coef, algorithm.entropy_coef, parts=coefs)
    micro = batches(samples, **packing)
    with jax.set_mesh(make_mesh(**(mesh_sizes or {}))):
        state = new_state(cfg)
        total, arrays = update.zeros(state.params), update._arrays(coefs)
        for batch in micro:
            total = update.accumulate(state.params, None, total, update.put(batch), None, arrays)
        weight = total.sums.weight
        grads = jax.device_get(jax.tree.map(lambda g: g / weight, unflatten(total.grads)))
        _, metrics = update.update(state, micro, coefs=coefs)
    return grads, metrics


@functools.cache
def mixture():
    return gradient(run_config(temperature=1.0, parts=PARTS, **LOSS), ONE)


@pytest.mark.thorough
def test_the_mixture_has_the_gradient_of_its_objectives_each_with_its_own_denominator():
    # a cross-entropy alone is the policy gradient loss of its tokens with advantages 1
    def alone(part, aggregation):
        own = [dataclasses.replace(s, loss_mask=s.parts == part, parts=None) for s in SAMPLES]
        own = [
            dataclasses.replace(s, advantages=np.ones(len(s.tokens), np.float32))
            for s in own
            if s.n_loss_tokens
        ]
        cfg = run_config(temperature=1.0, policy_loss="policy_gradient", aggregation=aggregation)
        return gradient(cfg, ONE, samples=own)

    policy = [dataclasses.replace(s, parts=None) for s in SAMPLES[:10]]
    rl = gradient(run_config(temperature=1.0, **LOSS), ONE, samples=policy)
    echo, sft = alone(1, "token_mean"), alone(2, "seq_mean_token_mean")
    grads, metrics = mixture()
    want = jax.tree.map(lambda a, b, c: a + 0.1 * b + 0.5 * c, rl[0], echo[0], sft[0])
    assert_same(grads, want)
    names = "loss/policy", "loss/entropy", "loss/clip_fraction", "mismatch/kl"
    assert_same({n: metrics[n] for n in names}, {n: rl[1][n] for n in names})
    nll = echo[1]["loss/total"], sft[1]["loss/total"]
    assert_same((metrics["loss/observations"], metrics["loss/demonstrations"]), nll)
    assert_same(metrics["loss/total"], rl[1]["loss/total"] + 0.1 * nll[0] + 0.5 * nll[1])


@pytest.mark.parametrize("layout", graded(LAYOUTS))
def test_a_mixture_does_not_depend_on_the_layout(layout):
    packing, mesh = LAYOUTS[layout]
    cfg = run_config(temperature=1.0, parts=PARTS, **LOSS)
    assert_same(gradient(cfg, packing, mesh), mixture())


def test_part_sums_have_the_hand_calculated_numbers():
    cfg = run_config(temperature=1.0, parts=PARTS)
    batch = dataclasses.replace(
        empty_batch(1, 8),
        segments=np.array([[1, 1, 1, 2, 2, 2, 2, 0]], np.int32),
        parts=np.array([[0, 1, 1, 2, 2, 0, 1, 0]], np.int32),
    )
    logp = jnp.array([[-9.0, -1.0, -2.0, -4.0, -6.0, -9.0, -3.0, jnp.inf]])
    terms = dict.fromkeys(GIVEN_PARTS, -logp)
    loss, means = part_sums(terms, jax.tree.map(jnp.asarray, batch), (0.1, 0.5), cfg=cfg)
    # observations: tokens 1 + 2 + 3 = 6; demonstrations: one sequence with the mean (4 + 6) / 2
    np.testing.assert_allclose(loss, 0.1 * 6 + 0.5 * 5, rtol=1e-6)
    np.testing.assert_allclose(means["loss/observations"], (6, 3), rtol=1e-6)
    np.testing.assert_allclose(means["loss/demonstrations"], (5, 1), rtol=1e-6)


def test_part_sums_do_not_depend_on_the_packing():
    cfg = run_config(temperature=1.0, parts=PARTS)
    program = jax.jit(functools.partial(part_sums, cfg=cfg))
    logps = [-np.random.default_rng(i).random(len(s.tokens)) for i, s in enumerate(SAMPLES)]

    def sums(rows, row_len):
        found = []
        for micro in pack(SAMPLES, shapes=((rows, row_len),), align=8, n_ranks=1):
            logp = np.full(micro.batch.tokens.shape, np.nan, np.float32)
            for span in micro.spans:
                logp[span.row, span.start : span.start + span.length] = logps[span.item]
            terms = dict.fromkeys(GIVEN_PARTS, -logp)
            found.append(program(terms, micro.batch, (0.3, 0.7)))
        assert len(found) > 1 or rows > 4
        return functools.reduce(lambda a, b: jax.tree.map(jnp.add, a, b), found)

    assert_same(sums(2, 64), sums(16, 32))


def test_the_factors_divide_each_part_by_its_own_denominator():
    cfg = run_config(parts=PARTS).algorithm
    samples = SAMPLES[:2] + SAMPLES[10:12]
    n_tokens = sum(int((s.parts == 1).sum()) for s in samples)
    got = part_factors(samples, 12.0, 0, cfg)
    # 0.1 * 12 / tokens, and 0.5 * 12 / 2 sequences
    np.testing.assert_allclose(got, (1.2 / n_tokens, 3.0), rtol=1e-12)
    assert part_factors(samples[:2], 12.0, 0, cfg)[1] == 0.0  # no demonstrations


TERMS = dict(temperature=1.0, policy_loss="policy_gradient", kl="k2", old_logp="rollout")
NAMED = ("policy?aggregation=seq_mean_token_mean", "kl?weight=0.3", "entropy?weight=0.02")
LISTS = ("math?parts=policy,kl", "chat?parts=kl,entropy")  # others have all three


def sourced(cfg):
    """Responses of three sources with tokens of an environment, and a reference's logprobs."""
    found = []
    for i, sample in enumerate(rollouts(12)):
        own = np.arange(len(sample.tokens)) % 4 != 2
        ref = np.random.default_rng(i).normal(-3.0, 1.0, len(sample.tokens)).astype(np.float32)
        sample = dataclasses.replace(sample, loss_mask=own, ref_logp=ref)
        found += sampled_parts([sample], ("math", "chat", "code")[i % 3], cfg.algorithm)
    return found


def of_tokens(cfg, rows=16, row_len=32):
    """(loss, gradient by the logprobs of each response, means) on a packing; entropy -0.5 logp."""
    samples, algorithm = sourced(cfg), cfg.algorithm
    factors = part_factors(samples, policy_weight(samples, algorithm), 0, algorithm)
    coefs = Coefs(algorithm.kl_coef, algorithm.entropy_coef, parts=factors)

    @jax.jit
    def program(logp, batch):
        def loss(logp):
            return token_loss_sums(logp, -0.5 * logp, None, batch, coefs, cfg=cfg)

        (total, sums), gradient = jax.value_and_grad(loss, has_aux=True)(logp)
        return total, sums, gradient

    packed = pack(samples, shapes=((rows, row_len),), align=8, n_ranks=1)
    results = []
    for micro in packed:
        logp = np.zeros(micro.batch.tokens.shape, np.float32)
        for span in micro.spans:
            logp[span.row, span.start : span.start + span.length] = LOGPS[span.item]
        results.append(program(logp, micro.batch))
    total, sums = functools.reduce(
        lambda a, b: jax.tree.map(jnp.add, a, b),
        [(r[0], (r[1].weight, r[1].means)) for r in results],
    )
    gradient = gather([np.asarray(g / sums[0]) for *_, g in results], packed)
    means = {name: x / n for name, (x, n) in sums[1].items()}
    return len(packed), (total / sums[0], gradient, means)


LOGPS = [
    np.random.default_rng(100 + i).normal(-2.0, 0.5, len(s.tokens)).astype(np.float32)
    for i, s in enumerate(rollouts(12))
]


def test_the_old_keys_are_parts_with_the_denominator_of_the_policy():
    parts = tuple(
        f"{part}?weight={w}" for part, w in (("policy", 1), ("kl", 0.3), ("entropy", 0.02))
    )
    mode = dict(aggregation="seq_mean_token_mean")
    keys = run_config(**TERMS, **mode, kl_coef=0.3, entropy_coef=0.02)
    _, (loss, gradient, _) = of_tokens(keys)
    _, named = of_tokens(run_config(**TERMS, **mode, parts=parts))
    assert_same((loss, gradient), named[:2])


def test_sources_have_their_own_parts_each_with_the_denominator_of_its_tokens():
    cfg = run_config(**TERMS, parts=NAMED, source_parts=LISTS)
    _, (loss, gradient, means) = of_tokens(cfg)
    samples, want = sourced(cfg), [np.zeros(len(x)) for x in LOGPS]
    of_part = {"policy": (0, 2), "kl": (0, 1, 2), "entropy": (1, 2)}  # math, chat, code
    members = {kind: [i for i in range(12) if i % 3 in of_part[kind]] for kind in of_part}
    n_tokens = {
        kind: sum(samples[i].n_loss_tokens for i in found) for kind, found in members.items()
    }
    losses = dict.fromkeys(of_part, 0.0)
    for kind, found in members.items():
        for i in found:
            mask, s, x = samples[i].loss_mask, samples[i], LOGPS[i].astype(float)
            if kind == "policy":  # -A log p, a mean of the means of responses
                n = len(found) * s.n_loss_tokens
                value, slope = -s.advantages * x / n, -s.advantages / n
            elif kind == "kl":  # 0.3 (log p - log q)^2 / 2
                d = x - s.ref_logp
                value, slope = d**2 / 2 / n_tokens[kind], 0.3 * d / n_tokens[kind]
            else:  # -0.02 H with H = -log p / 2
                value, slope = -x / 2 / n_tokens[kind], 0.02 / 2 / n_tokens[kind] + 0 * x
            losses[kind] += float((value * mask).sum())
            want[i] += slope * mask
    for got, expected in zip(gradient, want, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-8)
    for kind, value in losses.items():
        np.testing.assert_allclose(means[f"loss/{kind}"], value, rtol=1e-5)
    total = losses["policy"] + 0.3 * losses["kl"] - 0.02 * losses["entropy"]
    np.testing.assert_allclose(loss, total, rtol=1e-5)


def test_parts_of_sources_do_not_depend_on_the_packing():
    cfg = run_config(**TERMS, parts=NAMED, source_parts=LISTS)
    n_one, one = of_tokens(cfg)
    n_many, many = of_tokens(cfg, rows=2, row_len=64)
    assert n_one == 1 and n_many > 1
    assert_same(one, many)


def test_idle_responses_count_in_the_denominators_of_their_parts():
    algorithm = run_config(parts=("policy", "entropy?weight=0.5")).algorithm
    [a, b] = [s for i in (0, 1) for s in sampled_parts(rollouts(2)[i : i + 1], "x", algorithm)]
    n = a.n_loss_tokens + b.n_loss_tokens
    got = part_factors([a, b], 7.0, 0, algorithm)
    np.testing.assert_allclose(got, (7.0 / n, -3.5 / n), rtol=1e-12)


def pipelined(schedule, mesh, rules, *, shared):
    """(gradient of the summed loss, sums) over the micro-batches of prompts with four responses."""
    samples = []
    for s in GROUPS:
        own = np.arange(len(s.tokens)) % 3 != 1
        parts = np.where(own, 0, 1 + s.sample % 2).astype(np.int32)
        samples.append(dataclasses.replace(s, loss_mask=own, parts=parts))
    packed = pack(samples, shapes=((2, 64),), align=4, n_ranks=1, share_prefixes=shared)
    learner = dict(remat="full", pipeline_schedule=schedule)
    cfg = run_config(learner, temperature=1.0, parts=PARTS, **LOSS)

    @functools.partial(jax.jit, compiler_options=compiler_options(QUICK_COMPILE, "cpu"))
    def run(params, batch):
        coefs = Coefs(0.0, 0.01, parts=(0.3, 0.7))
        return loss_gradients(
            policy_objective, params, None, batch, None, coefs, cfg=cfg, rules=rules
        )

    with jax.set_mesh(make_mesh(None, **mesh)):
        params = put_params(host_weights(STACKED, 0), STACKED, rules)
        put = functools.partial(put_batch, rules=rules, has_parts=True)
        found = [jax.device_get(run(params, put(p.batch))) for p in packed]
    return len(packed), functools.reduce(
        lambda a, b: (jax.tree.map(np.add, a[0], b[0]), a[1] + b[1]), found
    )


@pytest.mark.thorough
def test_a_mixture_does_not_depend_on_shared_prefixes_and_1f1b():
    n_want, want = pipelined("gpipe", {}, TRAIN, shared=False)
    n_got, got = pipelined("1f1b", dict(stage=2), PIPELINE, shared=True)
    assert n_got < n_want
    assert_same(got, want)


@pytest.mark.thorough
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_parts_of_sources_do_not_depend_on_the_layout(layout):
    keys = TERMS | dict(kl="k3", policy_loss="ppo_clip")
    cfg = run_config(**keys, parts=(*NAMED, "observations?weight=0.1"), source_parts=LISTS)
    packing, mesh = LAYOUTS[layout]
    one = gradient(cfg, ONE, samples=sourced(cfg))
    assert_same(gradient(cfg, packing, mesh, samples=sourced(cfg)), one)
    assert {"loss/policy", "loss/kl", "loss/entropy", "loss/observations"} <= one[1].keys()


@pytest.mark.thorough
def test_a_part_of_the_routers_is_the_load_balancing_loss():
    def update(factors, **keys):
        cfg = run_config(dict(router_aux_coef=keys.pop("coef")), temperature=1.0, **keys)
        micro = batches(rollouts(), row_len=32, token_budget=256)
        with jax.set_mesh(make_mesh()):
            state, (_, update, _) = new_state(cfg, model=MOE), programs(cfg, MOE)
            return update.update(state, micro, coefs=Coefs(0.0, 0.0, parts=factors))[1]

    want = update((), coef=0.3)
    got = update((0.3,), coef=0.0, parts=("router?weight=0.3",))
    for name in ("loss/total", "optim/grad_norm", "router/balance_loss"):
        np.testing.assert_allclose(got[name], want[name], rtol=1e-6)
