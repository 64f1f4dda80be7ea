"""Divergences from a reference and logprobs of further ids in the chunked kernel."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.json_text import parse_json
from jaxrl.kernels import logprob
from jaxrl.kernels.logprob import collision_logp, divergence, token_scores, top_k_logp
from jaxrl.kernels.logprob.reference import head_logits
from sharding import make_mesh
from tests.kernels.test_logprob import RULES, assert_close, problem, value_and_grad

HEAD = dict(temperature=0.7, softcap=3.0)
AXES = dict(hidden=("batch", "time", None), unembed=("vocab", "w_embed"))
AXES |= dict(ref_hidden=("batch", "time", None), ref_unembed=("vocab", "w_embed"))
AXES |= dict(targets=("batch", "time"), ids=("batch", "time", None))
MESH = pytest.param(dict(fsdp=2, tensor=4), marks=pytest.mark.thorough)


def jsd(p, q, beta):
    """GKD, eq. 1, in numpy."""
    if beta in (0.0, 1.0):
        p, q = (p, q) if beta == 1.0 else (q, p)
        return np.sum(p * np.log(p / q), -1)
    m = beta * q + (1 - beta) * p
    return beta * np.sum(q * np.log(q / m), -1) + (1 - beta) * np.sum(p * np.log(p / m), -1)


def placed(inputs):
    return {name: jax.reshard(x, RULES.spec(*AXES[name])) for name, x in inputs.items()}


def test_the_divergence_of_two_coins_by_hand():
    p, q = np.array([0.5, 0.5]), np.array([0.25, 0.75])
    found = [
        float(divergence.terms(jnp.log(jnp.array(p)), jnp.log(jnp.array(q)), beta).sum())
        for beta in (0.0, 0.5, 1.0)
    ]
    # KL(q | p) = 0.25 ln 0.5 + 0.75 ln 1.5; m = (0.375, 0.625); KL(p | q) = 0.5 ln 2 - 0.5 ln 1.5
    half = 0.25 * np.log(0.25 / 0.375) + 0.75 * np.log(0.75 / 0.625)
    half += 0.5 * np.log(0.5 / 0.375) + 0.5 * np.log(0.5 / 0.625)
    np.testing.assert_allclose(found, [0.130812, half / 2, 0.143841], rtol=1e-5)


@pytest.mark.parametrize("sizes", [{}, MESH], ids=str)
@pytest.mark.parametrize("beta", [pytest.param(0.0, marks=pytest.mark.thorough), 0.3])
def test_divergences_and_their_gradients_equal_the_naive_form(monkeypatch, beta, sizes):
    monkeypatch.setattr(logprob, "GROUPED_CHUNKS", {"cpu": 4})
    inputs, weights = problem()

    def logs(hidden, unembed, ref_hidden, ref_unembed):
        pairs = (hidden, unembed), (ref_hidden, ref_unembed)
        return [jax.nn.log_softmax(head_logits(h, w, **HEAD)) for h, w in pairs]

    def naive(hidden, unembed, targets, ref_hidden, ref_unembed):
        logp, logq = logs(hidden, unembed, ref_hidden, ref_unembed)
        return (divergence.terms(logp, jax.lax.stop_gradient(logq), beta).sum(-1),)

    def kernel(ref_hidden, ref_unembed, **k):
        ref = ref_hidden, ref_unembed
        scores = token_scores(
            **k, ref=ref, beta=beta, temperature=0.7, logit_softcap=3.0, chunk=7, rules=RULES
        )
        return (scores.kl,)

    with jax.set_mesh(make_mesh()):
        want = value_and_grad(naive, inputs, weights[:1])
        rest = {name: inputs[name] for name in AXES if name in inputs and name != "targets"}
        p, q = (np.exp(np.asarray(x, np.float64)) for x in logs(**rest))
    np.testing.assert_allclose(want[0][0], jsd(p, q, beta), rtol=1e-4, atol=1e-6)
    with jax.set_mesh(make_mesh(**sizes)):
        rows = jax.reshard(weights[0], RULES.spec("batch", "time"))
        got = value_and_grad(kernel, placed(inputs), [rows])
    assert_close(want[0], got[0])
    assert_close(want[1], got[1], tol=2e-5)


@pytest.mark.parametrize("sizes", [{}, MESH], ids=str)
def test_logprobs_of_further_ids_and_their_gradient_equal_the_naive_form(monkeypatch, sizes):
    monkeypatch.setattr(logprob, "GROUPED_CHUNKS", {"cpu": 4})
    inputs, weights = problem()
    policy = {name: inputs[name] for name in ("hidden", "unembed", "targets")}
    rng = np.random.default_rng(4)
    ids = np.stack([rng.permutation(500)[:5] for _ in range(8 * 13)]).reshape(8, 13, 5)
    policy["ids"] = jnp.asarray(ids, jnp.int32)
    of_ids = jax.random.normal(jax.random.key(9), (8, 13, 5))

    def naive(hidden, unembed, targets, ids):
        logp = jax.nn.log_softmax(head_logits(hidden, unembed, **HEAD))
        pick = functools.partial(jnp.take_along_axis, logp, axis=-1)
        return pick(targets[..., None])[..., 0], pick(ids)

    def kernel(**k):
        scores = token_scores(**k, temperature=0.7, logit_softcap=3.0, chunk=7, rules=RULES)
        return scores.logp, scores.of_ids

    with jax.set_mesh(make_mesh()):
        want = value_and_grad(naive, policy, [weights[0], of_ids])
    with jax.set_mesh(make_mesh(**sizes)):
        specs = ("batch", "time"), ("batch", "time", None)
        rows = [
            jax.reshard(w, RULES.spec(*s)) for w, s in zip((weights[0], of_ids), specs, strict=True)
        ]
        got = value_and_grad(kernel, placed(policy), rows)
    assert_close(want[0], got[0])
    assert_close(want[1], got[1], tol=2e-5)


@pytest.mark.parametrize("sizes", [{}, MESH], ids=str)
def test_the_most_likely_ids_are_those_of_a_sort(sizes):
    inputs, _ = problem()
    policy = {name: inputs[name] for name in ("hidden", "unembed")}
    mask = (jnp.arange(13) % 3 > 0) * jnp.ones((8, 1))
    logits = head_logits(inputs["hidden"], inputs["unembed"], **HEAD)
    logp = np.asarray(jax.nn.log_softmax(logits))
    want = np.argsort(-logp, axis=-1)[..., :5]
    kept = np.asarray(mask)[..., None] > 0
    with jax.set_mesh(make_mesh(**sizes)):
        run = functools.partial(
            top_k_logp, k=5, temperature=0.7, logit_softcap=3.0, chunk=7, rules=RULES
        )
        ids, found = jax.device_get(jax.jit(run)(**placed(policy), mask=mask))
    np.testing.assert_array_equal(ids, want * kept)
    taken = np.take_along_axis(logp, want, axis=-1)
    np.testing.assert_allclose(found, taken * kept, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_other_ids_are_one_bucket(beta):
    """p = (0.5, 0.3, 0.1, 0.1), q = (0.2, 0.2, 0.3, 0.3), of which the first two are compared."""
    p, q = np.log([0.5, 0.3]), np.log([0.2, 0.2])
    want = jsd(np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.2, 0.6]), beta)
    got = divergence.of_top_k(jnp.asarray(p, jnp.float32), jnp.asarray(q, jnp.float32), beta)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    whole = jnp.log(jnp.array([0.5, 0.5])), jnp.log(jnp.array([0.25, 0.75]))  # nothing is left
    value, slope = jax.value_and_grad(divergence.of_top_k)(*whole, beta)
    np.testing.assert_allclose(value, jsd(*map(np.exp, map(np.asarray, whole)), beta), atol=1e-5)
    assert np.isfinite(slope).all()


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_ids_that_are_not_counted_are_in_the_bucket_and_have_no_gradient(beta):
    p, q = (np.random.default_rng(i).dirichlet(np.ones(6)) for i in (0, 1))
    ids, counted = np.array([4, 1, 4, 0]), np.array([True, True, False, False])
    logp, logq = (jnp.log(jnp.asarray(x[ids], jnp.float32)) for x in (p, q))
    value, slope = jax.value_and_grad(divergence.of_top_k)(logp, logq, beta, jnp.asarray(counted))
    coarse = [np.append(x[[4, 1]], 1 - x[4] - x[1]) for x in (p, q)]
    np.testing.assert_allclose(value, jsd(*coarse, beta), rtol=1e-5)
    want = jax.grad(divergence.of_top_k)(logp[:2], logq[:2], beta)
    np.testing.assert_allclose(slope[:2], want, rtol=1e-5, atol=1e-7)
    assert not slope[2:].any()


TRL = parse_json((Path(__file__).parent / "golden" / "distillation.json").read_text())
STUDENT, TEACHER = (jnp.array([TRL[name]], jnp.float32) for name in ("student", "teacher"))


def assert_same_as_trl(case, loss):
    """Losses of tokens, and the gradient of their sum with respect to the student's logits."""

    def total(logits):
        losses = loss(logits)
        return losses.sum(), losses

    (_, losses), grad = jax.jit(jax.value_and_grad(total, has_aux=True))(STUDENT)
    np.testing.assert_allclose(losses[0], case["loss"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(grad[0], case["gradient"], rtol=1e-5, atol=1e-6)


def of_logits(logits, temperature=1.0, **k):
    """The scores of logits: hidden states under an identity as unembedding."""
    eye, targets = jnp.eye(logits.shape[-1]), jnp.zeros(logits.shape[:2], jnp.int32)
    return token_scores(logits, eye, targets, temperature=temperature, chunk=2, rules=RULES, **k)


@pytest.mark.thorough
@pytest.mark.parametrize("case", TRL["vocabulary"], ids=lambda c: f"{c['beta']}-{c['temperature']}")
def test_the_divergence_over_the_vocabulary_is_that_of_trls_gkd(one_device, case):
    keys = dict(beta=case["beta"], temperature=case["temperature"])
    ref = TEACHER, jnp.eye(TEACHER.shape[-1])
    assert_same_as_trl(case, lambda logits: of_logits(logits, ref=ref, **keys).kl)


@pytest.mark.thorough
@pytest.mark.parametrize("case", TRL["most_likely"], ids=lambda c: str(c["beta"]))
def test_the_divergence_of_the_most_likely_ids_is_that_of_trls_sdpo(one_device, case):
    ids, logq = top_k_logp(
        *(TEACHER, jnp.eye(TEACHER.shape[-1]), TRL["k"]),
        temperature=1.0,
        chunk=2,
        rules=RULES,
        mask=jnp.ones(TEACHER.shape[:2]),
    )

    def loss(logits):
        return divergence.of_top_k(of_logits(logits, ids=ids).of_ids, logq, case["beta"])

    assert_same_as_trl(case, loss)


@pytest.mark.thorough
@pytest.mark.parametrize("sizes", [{}, MESH], ids=str)
def test_logprob_and_collision_probability_equal_the_naive_form(sizes):
    inputs, _ = problem()
    mask = jnp.asarray(np.arange(inputs["targets"].size).reshape(inputs["targets"].shape) % 5 != 2)
    with jax.set_mesh(make_mesh()):
        logits = head_logits(inputs["hidden"], inputs["unembed"], **HEAD)
        logp = jax.nn.log_softmax(logits)
        chosen = jnp.take_along_axis(logp, inputs["targets"][..., None], axis=-1)[..., 0]
        want = chosen, jnp.log(jnp.exp(2 * logp).sum(-1))
    with jax.set_mesh(make_mesh(**sizes)):
        names = ("hidden", "unembed", "targets")
        given = placed({name: inputs[name] for name in names})
        keep = jax.reshard(mask.astype(jnp.float32), RULES.spec("batch", "time"))
        head = dict(temperature=0.7, logit_softcap=3.0, chunk=7, rules=RULES)
        found = jax.jit(lambda keep, **k: collision_logp(**k, **head, mask=keep))(keep, **given)
    for a, b in zip(want, found, strict=True):
        np.testing.assert_allclose(b, np.where(mask, a, 0.0), rtol=1e-5, atol=1e-6)
