"""Tests of teachers at a server: scores, retries, failures, the cache, and the checks at start."""

import contextlib
import dataclasses

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jaxrl.config.keys import TeacherEndpointConfig
from jaxrl.config.teachers import read_teacher
from jaxrl.teachers import server as server_module
from jaxrl.teachers.endpoint import Counts, TeacherEndpoint, total_counts
from jaxrl.types import TrainingSample
from tests.teachers.fake_server import FakeServer, log_softmax

V = 256
QUICK = TeacherEndpointConfig(timeout_s=2.0, concurrency=4)


def byte_tokenizer(order=1):
    """One token per byte, in the order of the alphabet or in reverse."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[::order]
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture
def serve(tokenizer, monkeypatch):
    monkeypatch.setattr(server_module, "FIRST_WAIT_S", 0.01)
    with contextlib.ExitStack() as stack:

        def make(*args, **fields):
            made = FakeServer(*(args or (tokenizer, V)), **fields)
            stack.callback(made.close)
            return made

        yield make


def endpoint_of(server, cfg=QUICK, *, k=0, options=""):
    teacher, errors = read_teacher("algorithm.teacher", server.url + options)
    assert not errors
    return TeacherEndpoint(teacher, cfg, k=k, n_vocab=V)


def opened(server, tokenizer, cfg=QUICK, *, k=0, options="", max_len=100):
    endpoint = endpoint_of(server, cfg, k=k, options=options)
    endpoint.open(tokenizer, max_len=max_len)
    server.bodies.clear()
    return endpoint


def sample(prompt, response):
    tokens = np.array(response, np.int32)
    return TrainingSample(np.array(prompt, np.int32), tokens, np.ones(len(tokens), bool))


SAMPLES = [sample([5, 6], [7, 8, 9]), sample([1], [2, 3])]


@pytest.mark.parametrize("form", ["vllm", "sglang"])
@pytest.mark.parametrize("k", [0, 4])
def test_responses_have_the_logprobs_of_the_servers_model(serve, tokenizer, form, k):
    endpoint = opened(serve(form=form), tokenizer, k=k)
    found, counts = endpoint.read(SAMPLES)
    assert (counts.requests, counts.cached, counts.failed) == (2, 0, 0)
    for s, one in zip(SAMPLES, found, strict=True):
        tokens = [*s.prompt_tokens, *s.tokens]
        befores = tokens[len(s.prompt_tokens) - 1 : -1]
        for i, (before, token) in enumerate(zip(befores, s.tokens, strict=True)):
            logp = log_softmax(before, V)
            np.testing.assert_allclose(one.logp[i], logp[token], rtol=1e-6)
            want = np.argsort(-logp)[:k]
            np.testing.assert_array_equal(one.ids[i], want)
            np.testing.assert_allclose(one.top_logp[i], logp[want], rtol=1e-6)


def test_a_busy_server_is_asked_again_and_a_failure_has_no_scores(serve, tokenizer):
    server = serve()
    endpoint = opened(server, tokenizer)
    server.fail = lambda body, n: 503 if n == 1 else 0
    found, counts = endpoint.read(SAMPLES[:1])
    assert counts.failed == 0 and found[0] is not None and len(server.bodies) == 2
    server.bodies.clear()
    server.fail = lambda body, n: 500 if body["prompt"][0] == 1 else 0
    found, counts = endpoint.read(SAMPLES)
    assert found[0] is not None and found[1] is None
    assert counts.failed == 1 and "500" in counts.reason
    assert len(server.bodies) == 1 + QUICK.attempts
    server.bodies.clear()
    server.fail = lambda body, n: 400  # no other answer would come
    assert endpoint.read(SAMPLES[:1])[0] == [None] and len(server.bodies) == 1


@pytest.mark.parametrize(
    "reply", [b"{}", b"[1]", b'{"choices": [{"prompt_logprobs": [null]}]}', b"no JSON", b"\xff"]
)
def test_a_reply_without_the_scores_is_a_failure(serve, tokenizer, reply):
    server = serve()
    endpoint = opened(server, tokenizer)
    server.fail = lambda body, n: reply
    found, counts = endpoint.read(SAMPLES[:1])
    assert found == [None] and counts.failed == 1 and counts.reason


@pytest.mark.parametrize("wrong", [float("nan"), 0.5, float("-inf"), None])
def test_a_logprob_that_is_none_is_a_failure(serve, tokenizer, wrong):
    server = serve()
    endpoint = opened(server, tokenizer)
    complete = server.complete

    def changed(body):
        status, value = complete(body)
        value["choices"][0]["prompt_logprobs"][-1][str(body["prompt"][-1])]["logprob"] = wrong
        return status, value

    server.complete = changed
    assert endpoint.read(SAMPLES[:1])[0] == [None]


def test_equal_responses_are_sent_once_and_a_folder_keeps_them(serve, tokenizer, tmp_path):
    server, cfg = serve(), dataclasses.replace(QUICK, cache=str(tmp_path))
    first, counts = opened(server, tokenizer, cfg, k=2).read([*SAMPLES, SAMPLES[0]])
    assert (counts.requests, counts.cached) == (2, 1)
    again, counts = opened(server, tokenizer, cfg, k=2).read(SAMPLES)
    assert (counts.requests, counts.cached) == (0, 2) and not server.bodies
    for a, b in zip(first, again, strict=False):
        np.testing.assert_array_equal(a.logp, b.logp)
        np.testing.assert_array_equal(a.ids, b.ids)
    next(tmp_path.rglob("*.npz")).write_bytes(b"damaged")
    assert opened(server, tokenizer, cfg, k=2).read(SAMPLES)[1].requests == 1


REFUSED = {
    "no prompt logprobs": (dict(form="none"), {}, r"does not return the logprobs.*--max-logprobs"),
    "too few": (dict(max_logprobs=3), dict(k=4), r"at most 3 logprobs.*--max-logprobs at least 4"),
    "several models": (dict(models=("a", "b")), {}, r"serves 'a', 'b'; write the name.*\?model="),
    "no such model": (dict(), dict(options="?model=other"), r"serves 'm'; write the name"),
    "a short context": (dict(max_model_len=100), {}, r"context of 100 tokens.*may have 100"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_server_that_cannot_be_a_teacher_is_refused_at_the_start(serve, tokenizer, name):
    fields, keys, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        opened(serve(**fields), tokenizer, **keys)


def test_another_tokenizer_is_refused(serve, tokenizer):
    with pytest.raises(ValueError, match=r"its tokenizer makes .* policy's family"):
        opened(serve(byte_tokenizer(-1), V), tokenizer)
    server = serve(byte_tokenizer(-1), V)
    server.has_tokenize = False
    with pytest.raises(ValueError, match=r"reads a token as .* policy's family"):
        opened(server, tokenizer)
    with pytest.raises(ValueError, match=r"ids up to 255 .*out of vocabulary"):
        opened(serve(tokenizer, V - 1), tokenizer)
    server = serve()
    server.has_tokenize = False  # equal texts of ids are enough
    opened(server, tokenizer)


def test_a_server_that_is_not_there_is_refused(serve, tokenizer):
    server = serve()
    server.close()
    with pytest.raises(ValueError, match=r"start the server before the run"):
        opened(server, tokenizer)


def test_an_api_key_must_be_in_the_environment(serve, monkeypatch):
    monkeypatch.delenv("TEACHER_KEY", raising=False)
    with pytest.raises(ValueError, match=r"api_key_env='TEACHER_KEY' is not in the environment"):
        endpoint_of(serve(), dataclasses.replace(QUICK, api_key_env="TEACHER_KEY"))


def test_the_counts_of_processes_are_summed():
    counts = [Counts(3, 1, 1, "refused"), Counts(2, 0, 0)]
    assert total_counts(counts) == Counts(5, 1, 1, "refused")
