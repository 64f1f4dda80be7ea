"""Parsing of request bodies, hostile ones included.

Tests of jaxrl/serve/requests/request.py, fields.py, prompt.py and errors.py.
"""

import json
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.data.chat.encoding import ChatRenderer
from jaxrl.data.tokenizer import load_tokenizer
from jaxrl.http.dialects import messages
from jaxrl.http.dialects.responses import CHAT_NAMES, NO_EFFECT, OTHER
from jaxrl.http.errors import MAX_MESSAGE, RequestError
from jaxrl.serve.requests.dialects import parse_messages, parse_responses
from jaxrl.serve.requests.fields import IGNORED, UNSUPPORTED, ChatFields, CompletionFields
from jaxrl.serve.requests.prompt import ServerLimits, encode_text, longest_token
from jaxrl.serve.requests.request import GenerationRequest, parse_chat, parse_completion
from jaxrl.serve.structured.grammar import GrammarCompiler
from jaxrl.tool_calls.formats import FORMATS

MESSAGES = [{"role": "user", "content": "What is the sum?"}]


def parse_response(raw, renderer, limits) -> GenerationRequest:
    return parse_responses(raw, renderer, limits)[0]


def parse_message(raw, renderer, limits) -> GenerationRequest:
    return parse_messages(raw, renderer, limits)[0]


BASE = {
    parse_chat: {"messages": MESSAGES},
    parse_completion: {"prompt": "the sum"},
    parse_response: {"input": "the sum"},
    parse_message: {"messages": MESSAGES, "max_tokens": 9},
}


@pytest.fixture(scope="session")
def renderer(tokenizer_folder):
    return ChatRenderer(load_tokenizer(tokenizer_folder))


@pytest.fixture(scope="session")
def limits(renderer):
    return ServerLimits(
        model_name="tiny",
        max_model_len=1024,
        vocab=272,
        n_stop_ids=15,
        n_choices=80,
        longest_token=longest_token(renderer.tokenizer),
        grammars=GrammarCompiler(renderer.tokenizer, 272, [2]),
        tool_format=FORMATS["hermes"],
    )


def rejected(parse, body, renderer, limits) -> RequestError:
    raw = body if isinstance(body, bytes) else json.dumps(BASE[parse] | body).encode()
    with pytest.raises(RequestError) as error:
        parse(raw, renderer, limits)
    assert 400 <= error.value.status < 500
    assert len(error.value.message) <= MAX_MESSAGE + 4
    json.dumps(error.value.body(), ensure_ascii=False).encode()
    return error.value


SCALARS = ["model", "max_tokens", "temperature", "top_p", "n", "seed", "stream", "top_k", "min_p"]


@pytest.mark.parametrize("value", [{}, {"a": {}}, [], [[]], "1e999", 10**400, True, 1e308])
@pytest.mark.parametrize("name", SCALARS)
def test_a_value_of_the_wrong_kind_is_an_error(renderer, limits, name, value):
    if name != "stream" or value is not True:
        rejected(parse_completion, {name: value}, renderer, limits)


NUMBERS = {
    "the number 1e999 is too large": b'{"prompt": "x", "temperature": 1e999}',
    "the number 1111": b'{"prompt": "x", "temperature": ' + b"1" * 400 + b"}",
    "n=1.0 is of type float": b'{"prompt": "x", "n": 1.0}',
    "the number 9999": b'{"prompt": "x", "n": ' + b"9" * 400 + b"}",
    "max_tokens=2147483648": b'{"prompt": "x", "max_tokens": 2147483648}',
    "seed=9223372036854775808": b'{"prompt": "x", "seed": 9223372036854775808}',
    "token ids of a prompt": b'{"prompt": [-1]}',
    "prompt must be a string": b'{"prompt": [1.0]}',
}


@pytest.mark.parametrize("message", NUMBERS)
def test_numbers_out_of_range_are_errors(renderer, limits, message):
    assert message in rejected(parse_completion, NUMBERS[message], renderer, limits).message


@pytest.mark.parametrize(
    "body",
    [
        {"stop": list("abcde")},
        {"stop": "x" * 257},
        {"stop": {}},
        {"stop_token_ids": [1] * 16},
        {"stop_token_ids": [5] * 100_000},
        {"prompt": list("a" * 81)},
        {"prompt": ["x"] * 100_000},
        {"prompt": [[1]] * 41, "n": 2},
        {"prompt": [1] * 1025},
        {"prompt": "x" * (8 << 20)},
        {"n": 81},
        {"best_of": True},
        {"logit_bias": {"1": 500}},
        {"logit_bias": {str(i): 1 for i in range(301)}},
        {"logit_bias": {"\u0661": 1}},
        {"logit_bias": {"1": True}},
        {"logit_bias": [1]},
        {"stream_options": []},
        {"stream_options.include_usage": 1},
        {"x" * (1 << 20): 1},
        {f"field{i}": i for i in range(30_000)},
        {"model": "m" * (1 << 20)},
        {"temperature": "t" * (1 << 20)},
    ],
    ids=lambda body: f"{str(body)[:30]}",
)
def test_counts_and_lengths_are_checked_in_little_time(renderer, limits, body):
    parse_completion(b'{"prompt": "x"}', renderer, limits)
    start = time.thread_time()
    rejected(parse_completion, body, renderer, limits)
    assert time.thread_time() - start < 4  # 2 s with checked types on a busy machine; else 0.05 s


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "x" * (8 << 20)}],
        [{"role": "user", "content": ""}] * 1025,
        [{"role": "user", "content": [{"type": "text", "text": 5}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": {}, "content": "x"}],
        [{"role": "user", "content": {}}],
        {},
    ],
    ids=["long", "many", "number", "no text", "role", "content", "object"],
)
def test_messages_are_checked_before_they_are_rendered(renderer, limits, messages, monkeypatch):
    monkeypatch.setattr(renderer, "text", lambda _: pytest.fail("rendered"))
    rejected(parse_chat, {"messages": messages}, renderer, limits)


def test_fields_without_effect_are_accepted(renderer, limits):
    for name, values in UNSUPPORTED.items():
        for value in values:
            parse_completion(json.dumps({"prompt": "x", name: value}).encode(), renderer, limits)
    body = {"prompt": "x", "stream_options": {"include_usage": True}, "stop": list("abcd")}
    request = parse_completion(json.dumps(body).encode(), renderer, limits)
    assert request.include_usage and request.sampling.stop == tuple("abcd")


def test_long_text_is_tokenized_only_as_far_as_the_context_reaches(renderer, limits, monkeypatch):
    lengths, tokenizer = [], renderer.tokenizer

    def logged(text, **options):
        lengths.append(len(text))
        return tokenizer(text, **options)

    monkeypatch.setattr(renderer, "tokenizer", logged)
    fits = "the thing " * 200
    tokens = encode_text(fits, renderer, limits, special_tokens=True)
    np.testing.assert_array_equal(tokens, tokenizer(fits)["input_ids"])
    assert len(tokens) < 1024 and lengths == [2000]
    lengths.clear()
    with pytest.raises(RequestError, match="more than 1024 in the prompt") as long:
        encode_text("x" * 8000, renderer, limits, special_tokens=True)
    assert lengths == [4096] and long.value.code == "context_length_exceeded"


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([0, 1, -1, 2**31, 2**63, 10**400, 1e999, -1e999, float("nan"), 1e-320])
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["\x00", "\ud800", "\u2028", "<|im_end|>", "{{ x }}", "a" * 5000]),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)
NAMES = sorted(
    {*ChatFields.__dataclass_fields__, *CompletionFields.__dataclass_fields__}
    | {*UNSUPPORTED, *IGNORED, *ChatFields.untyped, *CompletionFields.untyped}
    | {*CHAT_NAMES, *NO_EFFECT, *OTHER}
    | {*messages.NO_EFFECT, *messages.OTHER, *messages.READ, *messages.IGNORED}
)
CALL = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
BLOCK = st.fixed_dictionaries(
    {"type": JSON | st.sampled_from(list(messages.BLOCK_FIELDS))},
    optional={name: JSON for names in messages.BLOCK_FIELDS.values() for name in names},
)
MESSAGE = st.fixed_dictionaries(
    {
        "role": JSON | st.sampled_from(["user", "assistant"]),
        "content": JSON | st.lists(BLOCK, max_size=3),
    },
    optional={
        "tool_calls": st.lists(JSON | st.just(CALL), max_size=2),
        "type": JSON | st.sampled_from(["message", "function_call", "function_call_output"]),
    },
)
SCHEMA = st.fixed_dictionaries({"type": st.just("object") | JSON, "properties": JSON | st.just({})})
FUNCTION = st.fixed_dictionaries({"name": JSON | st.just("f")}, optional={"parameters": SCHEMA})
STRUCTURED = (
    st.lists(st.fixed_dictionaries({"function": FUNCTION}) | FUNCTION, max_size=2)
    | st.fixed_dictionaries({"type": st.just("json_schema"), "json_schema": JSON})
    | st.fixed_dictionaries(
        {
            "type": st.just("json_schema"),
            "json_schema": st.fixed_dictionaries({"schema": SCHEMA | JSON}),
        }
    )
    | st.fixed_dictionaries({"format": JSON})
    | st.sampled_from(["required", {"type": "function", "function": {"name": "f"}}])
)
BODIES = st.dictionaries(
    st.sampled_from(NAMES) | st.text(max_size=8),
    JSON | st.lists(MESSAGE, max_size=3) | st.lists(st.integers(-1, 300), max_size=20) | STRUCTURED,
    max_size=6,
)


@st.composite
def raw_bodies(draw):
    """Bytes of a body: any JSON, a valid request with fields replaced, some with damaged bytes."""
    base = draw(st.sampled_from([{}, *BASE.values()]))
    body = draw(JSON) if draw(st.integers(0, 9)) == 0 else base | draw(BODIES)
    raw = json.dumps(body, ensure_ascii=draw(st.booleans())).encode(errors="surrogatepass")
    for _ in range(draw(st.integers(0, 3)) if draw(st.booleans()) else 0):
        at = draw(st.integers(0, len(raw)))
        raw = raw[:at] + draw(st.binary(max_size=3)) + raw[at + draw(st.integers(0, 3)) :]
    return raw


def check_outcome(parse, raw, renderer, limits):
    """A body is a request within the limits, or an error that clients can read."""
    try:
        request = parse(raw, renderer, limits)
    except RequestError as error:
        assert error.status in (400, 404)
        assert len(json.dumps(error.body(), ensure_ascii=False).encode()) < 8 * MAX_MESSAGE
    else:
        assert isinstance(request, GenerationRequest)
        assert 0 < len(request.prompts) * request.n <= limits.n_choices
        for prompt, n in zip(request.prompts, request.max_tokens, strict=True):
            assert 0 < n <= limits.max_model_len - len(prompt) < limits.max_model_len
        sampling = request.sampling
        assert 0 <= sampling.temperature <= 100 and 0 < sampling.top_p <= 1


@settings(max_examples=60, deadline=None)
@given(parse=st.sampled_from(list(BASE)), raw=raw_bodies())
def test_any_body_is_a_request_or_an_error(renderer, limits, parse, raw):
    check_outcome(parse, raw, renderer, limits)


@pytest.mark.slow
@settings(max_examples=10_000, deadline=None)
@given(parse=st.sampled_from(list(BASE)), raw=raw_bodies())
def test_any_of_10000_bodies_is_a_request_or_an_error(renderer, limits, parse, raw):
    check_outcome(parse, raw, renderer, limits)
