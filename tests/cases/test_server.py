"""Requests that once gave a server wrong output, or stopped it for others."""

import asyncio
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from jaxrl.data.chat.encoding import ChatRenderer
from jaxrl.data.token_text import BYTE_OF_CHARACTER, TokenTexts
from jaxrl.engine.api import Generated, GrammarError, TopTokens
from jaxrl.http.errors import RequestError
from jaxrl.http.json_pieces import json_pieces
from jaxrl.rollout.agents.chat import parse_reward
from jaxrl.serve.app import full_body
from jaxrl.serve.choice import Detokenizer
from jaxrl.serve.engine_thread import ServingThread
from jaxrl.serve.metrics import ServerMetrics
from jaxrl.serve.openai_format import ResponseFormatter
from jaxrl.serve.requests.prompt import ServerLimits
from jaxrl.serve.requests.request import parse_chat, parse_completion
from jaxrl.serve.response import ActiveResponse
from jaxrl.serve.structured import grammar as grammar_module
from jaxrl.serve.structured.grammar import MAX_QUEUED, GrammarCompiler
from jaxrl.serve.structured.schema_checker import SchemaChecker

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
STOP = 2
V = 262  # 259 tokens and 3 ids that the tokenizer does not know
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer():
    """A byte-level tokenizer without merges."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=259, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    backend.train_from_iterator([], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=SPECIAL[STOP], chat_template=TEMPLATE
    )


@pytest.fixture(scope="module")
def renderer(tokenizer):
    return ChatRenderer(tokenizer)


@pytest.fixture(scope="module")
def compiler(tokenizer):
    compiler = GrammarCompiler(tokenizer, V, [STOP])
    yield compiler
    compiler.close()


@pytest.fixture(scope="module")
def limits(compiler):
    return ServerLimits(
        "tiny", 20_000, V, n_stop_ids=9, n_choices=8, longest_token=2, grammars=compiler
    )


def ids_of(tokenizer, content: bytes) -> list[int]:
    """The token of each byte."""
    character = {byte: character for character, byte in BYTE_OF_CHARACTER.items()}
    return [tokenizer.convert_tokens_to_ids(character[byte]) for byte in content]


def answer(request, renderer, generated):
    """The body of a response whose only choice is `generated`, in a running event loop."""

    async def respond():
        engine, tasks = mock.Mock(spec=ServingThread), []
        engine.submit = tasks.extend
        workers = ThreadPoolExecutor(1)
        response = ActiveResponse(
            request, renderer, engine, ServerMetrics(), workers=workers, timeout_s=60.0
        )
        tasks[0].deliver(generated)
        formatter = ResponseFormatter(response, renderer, TokenTexts(renderer))
        return await full_body(response, formatter)

    return json.loads(asyncio.run(respond()))


def output(tokens, top=None):
    """The engine's output for a finished response; `top` are the likely tokens everywhere."""
    logp = np.full(len(tokens), -1.0, np.float32)
    if top is not None:
        rows = np.tile(np.array(top, np.int32), (len(tokens), 1))
        top = TopTokens(rows, np.tile(-np.arange(len(top), dtype=np.float32), (len(tokens), 1)))
    return Generated(0, np.array(tokens, np.int32), logp, logp, finish="length", top=top)


PART = "漢".encode()[:2]  # two of the three bytes of a character


def test_e6_top_logprobs_have_an_entry_for_every_token(tokenizer, renderer, limits):
    body = {"prompt": "x", "max_tokens": 1, "logprobs": 5}
    sampled, *others = ids_of(tokenizer, PART + b"a")
    top = [sampled, *others, 259, 260]  # two parts of a character, a letter, two ids without text
    got = answer(
        parse_completion(json.dumps(body).encode(), renderer, limits),
        renderer,
        output([sampled], top),
    )
    logprobs = got["choices"][0]["logprobs"]
    names = ["bytes:\\xe6", "bytes:\\xbc", "a", "", "token_id:260"]
    assert logprobs["top_logprobs"] == [dict(zip(names, [-1.0, -1, -2, -3, -4], strict=True))]
    assert logprobs["tokens"] == names[:1]


def test_e6_chat_logprobs_have_the_bytes_of_parts_of_characters(tokenizer, renderer, limits):
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
    body |= {"logprobs": True, "top_logprobs": 2}
    tokens = tokenizer("漢")["input_ids"]
    request = parse_chat(json.dumps(body).encode(), renderer, limits)
    [choice] = answer(request, renderer, output(tokens, tokens[:2]))["choices"]
    content = choice["logprobs"]["content"]
    assert b"".join(bytes(token["bytes"]) for token in content) == "漢".encode()
    assert [[other["bytes"] for other in token["top_logprobs"]] for token in content] == [
        [[0xE6], [0xBC]]
    ] * 3
    assert choice["message"]["content"] == "漢"


def test_e6_byte_tokens_of_sentencepiece_have_their_byte():
    vocab = {f"<0x{i:02X}>": i for i in range(256)} | {"▁": 256}
    backend = Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=TEMPLATE)
    texts = TokenTexts(ChatRenderer(fast))
    assert [texts[i].bytes for i in (0x41, 0xE6, 0xFF)] == [b"A", b"\xe6", b"\xff"]
    assert texts[0xE6].name == "bytes:\\xe6"


# Detokenization

ENDLESS = {  # tokens that never complete a character, or have no text
    "continuation bytes": b"\x80",
    "first bytes": b"\xf0",
    "half characters": b"\xf0\x9f\x98",
    "replacement characters": "\ufffd".encode(),
    "mixed": b"\xe6\x80\xf0",
}


@pytest.mark.parametrize("pattern", [*ENDLESS.values(), STOP, 260], ids=[*ENDLESS, "stop", "no id"])
def test_h3_detokenization_is_linear(tokenizer, pattern):
    n_decoded = 0

    def decode(tokens):
        nonlocal n_decoded
        n_decoded += len(tokens)
        return tokenizer.decode(tokens, skip_special_tokens=True)

    unit = ids_of(tokenizer, pattern) if isinstance(pattern, bytes) else [pattern]
    tokens = (unit * 600)[:600]
    detokenizer = Detokenizer(decode)
    text = "".join(detokenizer.add([token]) for token in tokens) + detokenizer.flush()
    assert n_decoded < 50 * len(tokens)
    assert text == tokenizer.decode(tokens, skip_special_tokens=True)


# Bytes of two, three and four, and those that UTF-8 has nowhere.
BYTES = st.lists(st.sampled_from([0x80, 0x9F, 0xBC, 0xC3, 0xE6, 0xF0, 0xFF, 0x41]), max_size=120)


@settings(max_examples=60, deadline=None)
@given(content=BYTES, size=st.integers(1, 40))
def test_h3_any_bytes_join_to_the_text(tokenizer, content, size):
    tokens, detokenizer = ids_of(tokenizer, bytes(content)), Detokenizer(tokenizer.decode)
    pieces = [detokenizer.add(tokens[i : i + size]) for i in range(0, len(tokens), size)]
    assert "".join(pieces) + detokenizer.flush() == bytes(content).decode(errors="replace")


@pytest.mark.parametrize("details", [{}, {"logprobs": 20}, {"stop": ["\n"]}], ids=str)
def test_m1_the_event_loop_neither_detokenizes_nor_formats(
    tokenizer, renderer, limits, monkeypatch, details
):
    threads, decode = set(), ChatRenderer.decode

    def recorded(self, *args, **options):
        threads.add(threading.current_thread())
        return decode(self, *args, **options)

    monkeypatch.setattr(ChatRenderer, "decode", recorded)
    body = {"prompt": "x", "max_tokens": 9} | details
    request = parse_completion(json.dumps(body).encode(), renderer, limits)
    got = answer(request, renderer, output(ids_of(tokenizer, b"some text"), range(20)))
    assert got["choices"][0]["text"] == "some text"
    assert threads and threading.current_thread() not in threads


def test_m1_every_token_is_decoded_once_for_logprobs(tokenizer, renderer, limits, monkeypatch):
    decode = mock.Mock(side_effect=renderer.decode)
    texts = TokenTexts(renderer)
    monkeypatch.setattr(renderer, "decode", decode)
    for _ in range(3):
        assert [texts[i].text for i in (5, 6, 5)]
    assert decode.call_count == 2


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=9) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=30,
)  # fmt: skip


@settings(max_examples=50, deadline=None)
@given(value=JSON, depth=st.integers(0, 4))
def test_m1_pieces_of_json_join_to_the_json(value, depth):
    with mock.patch("jaxrl.http.json_pieces.MAX_LEN", 3):
        assert json.loads("".join(json_pieces(value, depth))) == value


def test_m1_a_long_list_is_written_in_pieces():
    value = {"choices": [{"logprobs": {"content": [{"bytes": [1]}] * 5000}}]}
    pieces = list(json_pieces(value))
    assert json.loads("".join(pieces)) == value
    assert max(map(len, pieces)) < 5000


# Schemas

PATTERNS = [{"type": "string", "pattern": f"(a|b)*a(a|b){{{n}}}"} for n in range(3, 19)]


def built(compiler, schema):
    return compiler.build(compiler.compile(schema, param="response_format")).result(60)


def refused(compiler, schema):
    with pytest.raises(RequestError) as error:
        built(compiler, schema)
    return error.value


def test_h1_a_schema_that_never_compiles_is_refused(compiler, monkeypatch):
    schema = {"type": "integer", "multipleOf": 1299709}
    for _ in range(2):  # the second time without the compiler
        error = refused(compiler, schema)
        assert error.status == 400 and error.param == "response_format"
        assert "too complex" in error.message and "multipleOf" in error.message
        monkeypatch.setattr(SchemaChecker, "check", None)
    monkeypatch.undo()
    assert built(compiler, {"type": "integer", "multipleOf": 1009}).matcher().allowed().any()


@pytest.mark.thorough
@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": PATTERNS},
        {"type": "array", "items": {"allOf": PATTERNS}},
        {"type": "integer", "multipleOf": 15485863},
        {"anyOf": [{"type": "integer", "multipleOf": 1299709 + n} for n in range(30)]},
    ],
    ids=["patterns", "items", "multiple", "anyOf"],
)
def test_h1_relatives_are_refused(compiler, schema):
    assert refused(compiler, schema).status == 400
    assert built(compiler, {"type": "boolean"}).matcher().allowed().any()


def test_h1_parsing_does_not_compile(renderer, limits, monkeypatch):
    monkeypatch.setattr(SchemaChecker, "check", None)
    monkeypatch.setattr(grammar_module, "build_matcher", None)
    chosen = {"type": "json_schema", "json_schema": {"schema": {"allOf": PATTERNS}}}
    body = {"prompt": "x", "response_format": chosen}
    request = parse_completion(json.dumps(body).encode(), renderer, limits)
    assert request.adjustments.grammar.start is None


def test_h1_few_schemas_wait_and_a_shutdown_fails_them(tokenizer, monkeypatch):
    compiler, go = GrammarCompiler(tokenizer, V, [STOP]), threading.Event()

    def check(self, schema):
        go.wait(60)
        self.start()

    monkeypatch.setattr(SchemaChecker, "check", check)
    schemas = [{"const": n} for n in range(MAX_QUEUED + 1)]
    grammars = [compiler.compile(schema, param="x") for schema in schemas]
    waiting = [compiler.build(grammar) for grammar in grammars[:-1]]
    with pytest.raises(RequestError) as error:
        compiler.build(grammars[-1])
    assert error.value.status == 429
    assert waiting[-1].cancel()  # its client has left
    compiler.build(grammars[-1])
    compiler.stop()
    go.set()
    for future in waiting[:-1]:
        with pytest.raises(RequestError, match="shutting down"):
            future.result(60)
    compiler.close()


def test_h1_a_compiler_that_was_killed_is_replaced(compiler):
    built(compiler, {"const": "before"})
    compiler._checker._process.process.kill()
    compiler._checker._process.process.wait()
    assert refused(compiler, {"const": "during"}).status == 503
    assert built(compiler, {"const": "after"}).matcher().allowed().any()


@pytest.mark.parametrize(
    "schema",
    [
        {"const": "x" * 60_000},
        {"enum": ["x" * 20_000 + end for end in "abc"]},
        {"type": "string", "pattern": "^x{60000}$"},
    ],
    ids=["const", "enum", "pattern"],
)
def test_m2_a_long_constant_is_followed_in_linear_time(compiler, tokenizer, schema):
    matcher = built(compiler, schema).matcher()
    for token in ids_of(tokenizer, b'"' + b"x" * 400):
        allowed = matcher.allowed()
        assert allowed[token // 32] >> (token % 32) & 1
        matcher.accept([token])


def test_m2_a_grammar_that_takes_long_ends_its_response_only(compiler, monkeypatch):
    matcher = built(compiler, {"type": "object"}).matcher()
    clock = iter(np.arange(0.0, 100.0, 0.15))  # every measured call takes 0.15 s
    monkeypatch.setattr(time, "thread_time", lambda: float(next(clock)))
    matcher.allowed()
    with pytest.raises(GrammarError, match="ms per token"):
        matcher.allowed()


# Numbers and signals


@pytest.mark.parametrize("value", ["1e999", "-1e999", "1" * 400, "-" + "9" * 400, "NaN", "true"])
def test_a_reward_that_is_no_number_is_refused(value):
    with pytest.raises(RequestError) as error:
        parse_reward(b'{"reward": %s}' % value.encode())
    assert error.value.status == 400


def test_a_reward_of_many_digits_is_read():
    assert parse_reward(b'{"reward": ' + b"1" * 30 + b"}") == {"reward": float("1" * 30)}
    with pytest.raises(RequestError, match="within float32's range"):
        parse_reward(b'{"reward": ' + b"1" * 300 + b"}")
