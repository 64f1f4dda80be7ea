"""Tests of structured/grammar.py: masks along texts, and schemas that are refused."""

import json

import jsonschema
import numpy as np
import pytest

from jaxrl.data.tokenizer import load_tokenizer
from jaxrl.engine.api import GrammarError
from jaxrl.http.errors import RequestError
from jaxrl.serve.structured.grammar import MAX_SCHEMA_BYTES, GrammarCompiler

V, STOP = 300, 2  # the model has more token ids than the tokenizer


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder):
    return load_tokenizer(tokenizer_folder)


@pytest.fixture(scope="module")
def compiler(tokenizer):
    compiler = GrammarCompiler(tokenizer, V, [STOP])
    yield compiler
    compiler.close()


def compiled(compiler, schema, *, param="x"):
    """The grammar of a schema, built."""
    return compiler.build(compiler.compile(schema, param=param)).result()


def allowed_ids(matcher) -> set[int]:
    bits = matcher.allowed()[:, None] >> np.arange(32, dtype=np.uint32) & 1
    return set(np.flatnonzero(bits.reshape(-1)).tolist())


def accepts(grammar, tokenizer, text: str) -> bool:
    """Whether every token of the text is allowed, and the response may end after it."""
    matcher = grammar.matcher()
    for token in tokenizer(text, add_special_tokens=False)["input_ids"]:
        if token not in allowed_ids(matcher):
            return False
        matcher.accept([token])
    return STOP in allowed_ids(matcher)


def test_texts_of_the_schema_are_allowed_and_others_are_not(compiler, tokenizer):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    grammar = compiled(compiler, schema | {"additionalProperties": False})
    for text in ('{"a":1}', '{ "a":  -12 }', '{\n  "a": 0\n}'):
        assert accepts(grammar, tokenizer, text)
    for text in ("", "[]", '{"a":1', '{"b":1}', '{"a":1.5}', '{"a":' + " " * 40 + "1}"):
        assert not accepts(grammar, tokenizer, text)


def test_random_tokens_that_are_allowed_make_json_of_the_schema(compiler, tokenizer):
    schema = {
        "type": "object",
        "properties": {
            "word": {"type": "string", "maxLength": 8},
            "kind": {"enum": ["a", "b", 3, None]},
            "more": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
        },
        "required": ["word", "kind", "more"],
        "additionalProperties": False,
    }
    grammar, rng = compiled(compiler, schema), np.random.default_rng(0)
    for _ in range(20):
        matcher, tokens = grammar.matcher(), []
        while True:
            token = int(rng.choice(sorted(allowed_ids(matcher))))
            if token == STOP:
                break
            tokens.append(token)
            matcher.accept([token])
        jsonschema.validate(json.loads(tokenizer.decode(tokens)), schema)


def test_a_token_that_is_not_allowed_is_an_error(compiler):
    matcher = compiled(compiler, {"type": "object"}).matcher()
    with pytest.raises(GrammarError):
        matcher.accept([STOP])


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "strin"}, "strin"),
        ({"type": "object", "properties": 3}, "properties"),
        ({"type": "string", "not": {}}, "not"),
        ({"type": "string", "not": {}, "x-guidance": {"lenient": True}}, "not"),
        ({"$ref": "http://localhost/x"}, "http://localhost/x"),
        ({"$ref": "#/$defs/none"}, "none"),
        ({"$ref": "#"}, "no value"),
        ({"type": "string", "pattern": "(a"}, "regex"),
        ({"enum": []}, "Unsatisfiable"),
        ({"type": "string", "title": "x" * MAX_SCHEMA_BYTES}, "bytes"),
    ],
    ids=str,
)
def test_a_schema_that_a_grammar_cannot_express_is_refused_with_the_reason(
    compiler, schema, reason
):
    with pytest.raises(RequestError) as refused:
        compiled(compiler, schema, param="response_format")
    assert refused.value.status == 400 and refused.value.param == "response_format"
    assert reason in refused.value.message
