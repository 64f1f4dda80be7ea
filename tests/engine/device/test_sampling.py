"""Tests of sampling.py against a numpy reference and against the exact distribution."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.data.support import from_bits
from jaxrl.engine.device import sampling
from jaxrl.engine.device.sampling import (
    SamplingParams,
    cutoff_gap,
    row_keys,
    sample,
    softmax_of_blocks,
    uniforms,
)

V = 700  # no multiple of the block
jit_sample = jax.jit(sample)


def params(n, *, temperature=1.0, **filters) -> SamplingParams:
    """Equal rows, with these filters only."""
    dtypes = {"top_k": jnp.int32, "top_p": jnp.float32, "min_p": jnp.float32}
    columns = {name: jnp.full(n, value, dtypes[name]) for name, value in filters.items()}
    return SamplingParams(jnp.full(n, temperature, jnp.float32), **columns)


def random_logits(n=4, scale=3.0, seed=0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, V)).astype(np.float32) * scale


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def kept_reference(logits: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """The tokens of one row that the filters keep, by sorting."""
    p = softmax(logits.astype(np.float64))
    order = np.argsort(-p, kind="stable")
    keep = np.zeros(V, bool)
    keep[order[: top_k or V]] = True
    p = np.where(keep, p, 0) / p[keep].sum()
    if top_p < 1:
        before = np.cumsum(p[order]) - p[order]
        keep[order[before >= top_p]] = False
    return keep & (p >= min_p * p.max())


FILTERS = [
    dict(top_k=1),
    dict(top_k=20),
    dict(top_k=10_000),
    dict(top_p=0.9),
    dict(top_p=0.05),
    dict(min_p=0.1),
    dict(top_k=50, top_p=0.8, min_p=0.02),
]


def kept_by(logits: np.ndarray, rows: SamplingParams) -> np.ndarray:
    """The tokens that the filters keep."""

    @jax.jit
    def find(logits, rows):
        softmax = softmax_of_blocks(logits, rows.temperature)
        gaps = softmax.gaps()
        return gaps <= cutoff_gap(gaps, softmax, rows, logits.shape[1])[:, None, None]

    kept = find(logits, rows).reshape(len(logits), -1)
    return np.asarray(kept)[:, : logits.shape[1]]


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("kw", FILTERS, ids=str)
def test_filters_keep_exactly_the_tokens_of_the_numpy_reference(kw, platform, monkeypatch):
    """Also with the search of accelerators."""
    monkeypatch.setattr(sampling, "target_platform", lambda: platform)
    logits = random_logits(8)
    kept = kept_by(logits, params(8, **kw))
    full = dict(top_k=0, top_p=1.0, min_p=0.0) | kw
    want = np.stack([kept_reference(row, **full) for row in logits])
    np.testing.assert_array_equal(kept, want)
    assert kw == dict(top_k=10_000) or want.sum() < want.size


def test_the_token_at_the_cutoff_can_be_sampled():
    """A number near 1 samples the kept token with the largest id, likely or not."""
    B, V, k = 4096, 384, 5
    logits = np.random.default_rng(3).standard_normal((B, V), np.float32)
    uniform = np.full(B, 0.9999, np.float32)
    token = jax.jit(sample)(logits, uniform, params(B, top_k=k)).token
    kept = np.argsort(logits, axis=1)[:, -k:]
    np.testing.assert_array_equal(token, kept.max(axis=1))


def test_tokens_that_tie_at_the_cutoff_are_kept():
    logits = np.full((1, V), -5.0, np.float32)
    logits[0, :3] = 2.0, 1.0, 1.0
    assert np.flatnonzero(kept_by(logits, params(1, top_k=2))).tolist() == [0, 1, 2]


def draw(logits_row: np.ndarray, n: int, **kw) -> np.ndarray:
    """`n` samples of one row, each at another position."""
    keys = row_keys(*(jnp.full(n, x, jnp.uint32) for x in (3, 5, 1)))
    u = uniforms(keys, jnp.arange(n))
    logits = jnp.broadcast_to(logits_row, (n, V))
    return np.asarray(jit_sample(logits, u, params(n, **kw)).token)


@pytest.mark.parametrize(
    "kw",
    [
        dict(),
        dict(temperature=0.6),
        pytest.param(dict(top_p=0.9, top_k=100), marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_sampled_frequencies_match_the_distribution(kw):
    row, n = random_logits(1, scale=2.0)[0], 20_000
    temperature = kw.get("temperature", 1.0)
    p = softmax(row / temperature)
    keep = kept_reference(row, kw.get("top_k", 0), kw.get("top_p", 1.0), 0.0)
    p = np.where(keep, p, 0) / p[keep].sum()
    counts = np.bincount(draw(row, n, **kw), minlength=V)
    assert counts[~keep].sum() == 0
    order = np.argsort(-p)
    big = order[: int((n * p > 20).sum())]
    observed = np.append(counts[big], n - counts[big].sum())
    expected = np.append(n * p[big], n * (1 - p[big].sum()))
    bins = expected > 5
    chi2 = ((observed[bins] - expected[bins]) ** 2 / expected[bins]).sum()
    degrees = bins.sum() - 1
    assert chi2 < degrees + 4 * np.sqrt(2 * degrees)  # four standard deviations of chi-square


def test_rows_sample_by_their_own_parameters():
    logits = random_logits(4)
    mixed = SamplingParams(
        temperature=jnp.array([0.0, 1.0, 0.5, 1.0]),
        top_k=jnp.array([0, 1, 0, 0]),
        top_p=jnp.array([1.0, 1.0, 1.0, 0.01]),
        min_p=jnp.array([0.0, 0.0, 1.0, 0.0]),
    )
    for u in (0.0, 0.5, 0.999):
        sampled = jit_sample(jnp.asarray(logits), jnp.full(4, u), mixed)
        np.testing.assert_array_equal(
            sampled.token, logits.argmax(-1)
        )  # each filter leaves one token
        scaled = logits / np.array([1, 1, 0.5, 1], np.float32)[:, None]
        want = np.log(softmax(scaled.astype(np.float64)).max(-1))
        np.testing.assert_allclose(sampled.logp, want, atol=1e-5)


@pytest.mark.parametrize("kw", FILTERS, ids=str)
def test_the_logprobs_are_those_without_and_with_the_filters(kw):
    logits = random_logits(8)
    filters = dict(top_k=0, top_p=1.0, min_p=0.0) | kw
    sampled = jit_sample(jnp.asarray(logits), jnp.full(8, 0.7), params(8, temperature=2.0, **kw))
    for b, token in enumerate(np.asarray(sampled.token)):
        p = softmax(logits[b].astype(np.float64) / 2)
        kept = p[kept_reference(logits[b] / 2, **filters)].sum()
        np.testing.assert_allclose(sampled.logp[b], np.log(p[token]), atol=1e-5)
        np.testing.assert_allclose(sampled.behavior_logp[b], np.log(p[token] / kept), atol=1e-5)


@pytest.mark.parametrize("kw", [FILTERS[1], FILTERS[-1]], ids=str)
def test_the_support_has_the_tokens_that_the_filters_keep(kw):
    logits, filters = random_logits(4), dict(top_k=0, top_p=1.0, min_p=0.0) | kw
    rows = params(5, **kw)
    rows = rows.replace(temperature=rows.temperature.at[4].set(0.0))  # greedy: no filter
    found = jax.jit(functools.partial(sample, keep_support=True))(
        jnp.asarray(np.concatenate([logits, logits[:1]])), jnp.full(5, 0.4), rows
    )
    sets = from_bits(np.asarray(found.support))
    want = [np.flatnonzero(kept_reference(row, **filters)) for row in logits]
    np.testing.assert_array_equal(sets.ids, np.concatenate(want))
    assert sets.counts.tolist() == [*map(len, want), 0]


def test_rows_without_a_filter_have_two_bitwise_equal_logprobs():
    """Also if another row of the batch has one, and in greedy rows."""
    logits = jnp.asarray(random_logits(3))
    mixed = SamplingParams(
        temperature=jnp.array([1.0, 0.0, 1.0]),
        top_k=jnp.array([0, 3, 3]),
        top_p=jnp.array([1.0, 0.5, 1.0]),
        min_p=jnp.zeros(3),
    )
    sampled = jit_sample(logits, jnp.full(3, 0.5), mixed)
    equal = np.asarray(sampled.logp) == np.asarray(sampled.behavior_logp)
    np.testing.assert_array_equal(equal, [True, True, False])


def test_filters_of_other_rows_change_no_bit_of_a_row():
    """Nor does the variant of the program that has filters."""
    logits, uniform = jnp.asarray(random_logits(3)), jnp.array([0.2, 0.6, 0.9])
    rows = SamplingParams(jnp.array([1.0, 0.0, 0.7]))
    filtered = rows.replace(top_k=jnp.array([0, 0, 3]), top_p=jnp.array([1.0, 1.0, 0.5]))
    want, got = jit_sample(logits, uniform, rows), jit_sample(logits, uniform, filtered)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[:2], b[:2]), want, got)
    assert got.behavior_logp[2] > want.behavior_logp[2]


def test_the_single_pass_of_accelerators_samples_the_same_tokens(monkeypatch):
    logits, uniform = jnp.asarray(random_logits(32)), jnp.linspace(0, 0.999, 32)
    rows = SamplingParams(jnp.linspace(0, 2, 32), top_p=jnp.full(32, 0.9).at[::2].set(1))
    want = jit_sample(logits, uniform, rows)
    monkeypatch.setattr(sampling, "target_platform", lambda: "gpu")
    got = jax.jit(lambda *args: sample(*args))(logits, uniform, rows)
    np.testing.assert_array_equal(got.token, want.token)
    np.testing.assert_allclose(got.logp, want.logp, atol=1e-5)
    np.testing.assert_allclose(got.behavior_logp, want.behavior_logp, atol=1e-5)


def test_extreme_uniforms_never_hit_a_token_of_weight_zero():
    logits = np.full((2, V), -np.inf, np.float32)
    logits[:, 300:303] = 1.0, 2.0, 3.0
    for u in (0.0, 1 - 2**-23):
        token = jit_sample(jnp.asarray(logits), jnp.full(2, u), params(2)).token
        np.testing.assert_array_equal(token, [300, 300] if u == 0 else [302, 302])


def test_random_numbers_depend_on_seed_prompt_sample_and_position_alone():
    def u(seed, prompt, sample_id, position):
        ids = (jnp.array([7, x], jnp.uint32) for x in (seed, prompt, sample_id))
        return float(uniforms(row_keys(*ids), jnp.array([9, position]))[1])

    base = u(1, 2, 3, 4)
    others = {u(5, 2, 3, 4), u(1, 5, 3, 4), u(1, 2, 5, 4), u(1, 2, 3, 5)}
    assert base not in others and len(others) == 4
    key = row_keys(*(jnp.array([x], jnp.uint32) for x in (1, 2, 3)))
    assert float(uniforms(key, jnp.array([4]))[0]) == base
