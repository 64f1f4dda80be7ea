"""Tests of adjustments.py against a NumPy twin, and of the engine that applies it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.config.keys import SamplingConfig
from jaxrl.data.support import n_words
from jaxrl.engine.api import GrammarError, LogitAdjustments, Request
from jaxrl.engine.device.adjustments import (
    MAX_BIAS,
    N_TOP,
    Adjustments,
    RowState,
    TokenCounts,
    adjust,
    count_drafts,
    count_tokens,
)
from jaxrl.models.packed import forward_packed
from sharding import make_mesh
from sharding.rules import REPLICAS, TRAIN
from tests.engine.engine_cases import (
    FAMILIES,
    make_engine,
    make_params,
    make_requests,
    record_dispatches,
)

V = 37
GREEDY = SamplingConfig(temperature=0.0)


def adjust_by_hand(
    logits, own: LogitAdjustments, prompt: list[int], response: list[int], stop_ids=(), allowed=None
):
    """The equations of LogitAdjustments for one row; `allowed` are token ids or None for all."""
    logits = np.array(logits, np.float64)
    for token in {*prompt, *response}:
        x = logits[token]
        penalty = own.repetition_penalty
        logits[token] = x / penalty if x > 0 else x * penalty
    for token in set(response):
        n = response.count(token)
        logits[token] -= own.frequency_penalty * n + own.presence_penalty
    for token, value in own.bias:
        logits[token] += value
    if len(response) < own.min_tokens:
        logits[list(stop_ids)] = -np.inf
    if allowed is not None:
        logits[[v for v in range(len(logits)) if v not in allowed]] = -np.inf
    return logits


def pack(allowed, n_vocab: int) -> np.ndarray:
    bits = np.zeros(n_words(n_vocab) * 32, np.uint32)
    bits[list(allowed)] = 1
    return (bits.reshape(-1, 32) << np.arange(32, dtype=np.uint32)).sum(1, dtype=np.uint32)


ROWS = [
    LogitAdjustments(),
    LogitAdjustments(repetition_penalty=1.7),
    LogitAdjustments(frequency_penalty=0.4, presence_penalty=-0.3, min_tokens=6),
    LogitAdjustments(bias=((3, 2.5), (V - 1, -100.0)), min_tokens=5),
    LogitAdjustments(repetition_penalty=0.8, frequency_penalty=-2.0, bias=((0, 1.0),)),
]


def device_rows(rows: list[LogitAdjustments], prompt_len, allowed) -> Adjustments:
    bias_ids = np.full((len(rows), MAX_BIAS), V, np.int32)
    bias = np.zeros((len(rows), MAX_BIAS), np.float32)
    for b, row in enumerate(rows):
        for k, (token, value) in enumerate(row.bias):
            bias_ids[b, k], bias[b, k] = token, value
    return Adjustments(
        repetition_penalty=np.array([r.repetition_penalty for r in rows], np.float32),
        frequency_penalty=np.array([r.frequency_penalty for r in rows], np.float32),
        presence_penalty=np.array([r.presence_penalty for r in rows], np.float32),
        bias_ids=bias_ids,
        bias=bias,
        min_tokens=np.array([r.min_tokens for r in rows], np.int32),
        prompt_len=np.array(prompt_len, np.int32),
        allowed=np.stack([pack(ids, V) for ids in allowed]),
        top_logprobs=np.zeros(len(rows), bool),
    )


def test_adjusted_logits_are_those_of_the_numpy_twin():
    rng = np.random.default_rng(0)
    B, prompt_len, n_tokens = len(ROWS), [3, 1, 4, 2, 7], [8, 5, 9, 7, 12]
    history = rng.integers(0, V, (B, 16)).astype(np.int32)  # later tokens do not count
    logits = rng.normal(size=(B, V)).astype(np.float32) * 3
    allowed = [range(V), {1, 5, 36}, range(V), range(2, V), {0, 31, 32}]
    stops = np.array([[-1, -1], [4, -1], [4, 5], [4, 5], [4, -1]], np.int32)

    @jax.jit
    def run(logits, history, rows, stops, position):
        counts = count_tokens(history, position, rows, V)
        return adjust(logits, RowState(rows, counts, stops, position))

    rows = device_rows(ROWS, prompt_len, allowed)
    found = run(logits, history, rows, stops, jnp.array(n_tokens) - 1)
    for b, own in enumerate(ROWS):
        tokens, ids = history[b, : n_tokens[b]].tolist(), stops[b][stops[b] >= 0]
        prompt, response = tokens[: prompt_len[b]], tokens[prompt_len[b] :]
        want = adjust_by_hand(logits[b], own, prompt, response, ids, allowed[b])
        np.testing.assert_allclose(found[b], want, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(found[0], logits[0])  # no adjustment: bit by bit


def test_each_draft_position_counts_the_drafts_before_it():
    counts = TokenCounts(jnp.zeros((2, V), jnp.int32).at[:, 4].set(1), jnp.zeros((2, V), bool))
    drafts, live = jnp.array([[4, 7], [-1, 3]]), jnp.array([[True, True], [False, False]])
    found = np.asarray(count_drafts(counts, drafts, live).n_generated)
    want = np.zeros((6, V), int)  # (row, number of drafts before)
    want[:, 4] = 1
    want[1:3, 4] += 1
    want[2, 7] += 1
    np.testing.assert_array_equal(found, want)


@dataclasses.dataclass
class Counting:
    """A toy grammar over V tokens: each token is the last one + 1 or + 2, up to 30; then stop."""

    n_vocab: int
    stop: int
    last: int = 9
    fail_at: int = 1000

    def matcher(self) -> "Counting":
        return dataclasses.replace(self)

    def allowed(self) -> np.ndarray:
        if self.last >= self.fail_at:
            raise GrammarError("too complex")
        return pack({self.last + 1, self.last + 2} if self.last < 30 else {self.stop}, self.n_vocab)

    def accept(self, tokens) -> None:
        for token in tokens:
            assert token in (self.last + 1, self.last + 2)
            self.last = token


def results(engine, params, requests):
    """Per request: (tokens, logps, behavior logps, finish, top ids, top logps)."""
    slots = [engine.submit(r) for r in requests]
    out = {slot: ([], [], [], [], [], []) for slot in slots}
    while engine.n_unfinished:
        for made in engine.generate(params):
            tokens, logp, behavior, finish, ids, top = out[made.slot]
            tokens += made.tokens.tolist()
            logp += made.logp.tolist()
            behavior += made.behavior_logp.tolist()
            finish.append(made.finish)
            if made.top is not None:
                ids += made.top.ids.tolist()
                top += made.top.logp.tolist()
    return [out[slot] for slot in slots]


def adjusted_requests() -> list[Request]:
    """Plain requests in between requests with every adjustment; vocabulary of 512, stop token 1."""
    base = make_requests(8, n_samples=1, max_tokens=24)
    grammar = Counting(512, stop=1)
    changes = [
        dict(),
        dict(adjustments=LogitAdjustments(repetition_penalty=1.5), sampling=GREEDY),
        dict(adjustments=LogitAdjustments(frequency_penalty=1.5, presence_penalty=0.5)),
        dict(adjustments=LogitAdjustments(bias=((7, 100.0),)), top_logprobs=True),
        dict(adjustments=LogitAdjustments(bias=((1, 40.0),), min_tokens=9)),
        dict(adjustments=LogitAdjustments(grammar=grammar), top_logprobs=True),
        dict(adjustments=LogitAdjustments(grammar=grammar), sampling=GREEDY),
        dict(sampling=SamplingConfig(temperature=0.7, top_k=5)),
    ]
    return [dataclasses.replace(r, **c) for r, c in zip(base, changes, strict=True)]


def model_logps(params, request: Request, response: list[int]) -> np.ndarray:
    """log softmax(logits / temperature) before each token of the response, float64 [n, V]."""
    tokens = np.zeros((1, 256), np.int32)
    n = len(request.tokens) + len(response)
    tokens[0, :n] = [*request.tokens, *response]
    spec = TRAIN.spec("batch", "time")
    segments, positions = (np.arange(256)[None] < n).astype(np.int32), np.arange(256)[None]
    rows = [jax.device_put(np.asarray(a, np.int32), spec) for a in (tokens, segments, positions)]
    logits = np.asarray(compute_logits(params, *rows))[0, len(request.tokens) - 1 : n - 1]
    logits = logits.astype(np.float64) / (request.sampling.temperature or 1.0)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


@jax.jit
def compute_logits(params, tokens, segments, positions):
    return params.logits(forward_packed(params, tokens, segments, positions, rules=TRAIN), TRAIN)


def check_results(requests, found, params, plain_engine):
    plain = [0, 7]
    np.testing.assert_equal(
        [found[i][:3] for i in plain],
        [r[:3] for r in results(plain_engine, params, [requests[i] for i in plain])],
    )
    for request, (tokens, logp, behavior, _, ids, top) in zip(requests, found, strict=True):
        want = model_logps(params, request, tokens)
        steps = np.arange(len(tokens))
        np.testing.assert_allclose(logp, want[steps, tokens], atol=1e-4)  # without adjustments
        if request.adjustments is None or request.sampling.top_k:
            continue
        allowed, last = None, 9
        for t, token in enumerate(tokens):
            if request.adjustments.grammar:
                allowed = {last + 1, last + 2} if last < 30 else {1}
                last = token
            temperature = request.sampling.temperature or 1.0
            adjusted = adjust_by_hand(
                want[t] * temperature,
                request.adjustments,
                request.tokens.tolist(),
                tokens[:t],
                (1,),
                allowed,
            )
            # want is shifted by a constant per step, which repetition penalties do not ignore.
            if request.adjustments.repetition_penalty == 1:
                scaled = adjusted / temperature
                behavior_want = scaled[token] - np.log(np.exp(scaled - scaled.max()).sum())
                np.testing.assert_allclose(behavior[t], behavior_want - scaled.max(), atol=1e-4)
        if request.top_logprobs:
            np.testing.assert_array_equal(ids, np.argsort(-want, axis=1)[:, :N_TOP])
            np.testing.assert_allclose(top, -np.sort(-want, axis=1)[:, :N_TOP], atol=1e-4)
    tokens = [r[0] for r in found]
    assert tokens[3] == [7] * 24
    assert len(tokens[4]) == 10 and tokens[4][-1] == 1  # the bias ends it after min_tokens
    for counted in tokens[5], tokens[6]:
        assert counted[-1] == 1 and 30 <= counted[-2] <= 31
    assert found[5][3][-1] == found[6][3][-1] == "stop"
    repeated = len(tokens[2]) - len(set(tokens[2]))
    assert repeated <= 2


@pytest.mark.thorough
def test_the_engine_samples_from_the_adjusted_logits(llama):
    cfg, params = llama
    engine = make_engine(cfg, adjustable=True)
    requests, dispatched = adjusted_requests(), record_dispatches(engine)
    check_results(requests, results(engine, params, requests), params, make_engine(cfg))
    assert any(one.kind == "decode" and one.variant.adjusted for one in dispatched)
    dispatched.clear()
    results(engine, params, [requests[0], requests[7]])
    assert not any(one.variant.adjusted for one in dispatched)


@pytest.mark.thorough
def test_speculative_decoding_samples_the_same_tokens_from_adjusted_logits(one_device):
    cfg = dataclasses.replace(FAMILIES["llama"], V=40)
    params, requests = make_params(cfg), adjusted_requests()
    requests = [dataclasses.replace(r, tokens=r.tokens % 40) for r in requests]
    for i in 5, 6:
        own = LogitAdjustments(grammar=Counting(40, stop=1))
        requests[i] = dataclasses.replace(requests[i], adjustments=own)
    speculating = make_engine(cfg, adjustable=True, spec_tokens=4)
    want = results(make_engine(cfg, adjustable=True), params, requests)
    found = results(speculating, params, requests)
    for ours, theirs in zip(found, want, strict=True):
        assert ours[0] == theirs[0] and ours[3][-1] == theirs[3][-1]
        np.testing.assert_allclose(ours[1], theirs[1], atol=1e-5)
    assert speculating.take_stats().n_accepted_tokens > 0


@pytest.mark.thorough
def test_replicas_and_tensor_shards_sample_the_same_tokens_from_adjusted_logits():
    cfg, requests = FAMILIES["llama"], adjusted_requests()
    with jax.set_mesh(make_mesh()):
        want = results(make_engine(cfg, adjustable=True), make_params(cfg), requests)
    with jax.set_mesh(make_mesh(replica=2, tensor=2)):
        engine = make_engine(cfg, adjustable=True, rules=REPLICAS)
        found = results(engine, make_params(cfg), requests)
    assert [r[0] for r in found] == [r[0] for r in want]


@pytest.mark.thorough
def test_a_grammar_that_fails_ends_its_response_only(llama):
    cfg, params = llama
    failing = LogitAdjustments(grammar=Counting(512, stop=1, fail_at=20))
    requests = adjusted_requests()
    requests[5] = dataclasses.replace(requests[5], adjustments=failing)
    found = results(make_engine(cfg, adjustable=True), params, requests)
    assert found[5][3][-1] == "error" and len(found[5][0]) < 12
    assert all(
        finish[-1] in ("stop", "length") for i, (*_, finish, _, _) in enumerate(found) if i != 5
    )


def test_an_engine_without_adjustments_rejects_them(llama):
    engine = make_engine(llama[0])
    with pytest.raises(ValueError, match="adjustable=True"):
        engine.submit(adjusted_requests()[1])
    bias = tuple((i, 1.0) for i in range(MAX_BIAS + 1))
    request = dataclasses.replace(adjusted_requests()[1], adjustments=LogitAdjustments(bias=bias))
    with pytest.raises(ValueError, match="301 tokens have a bias"):
        make_engine(llama[0], adjustable=True).submit(request)
