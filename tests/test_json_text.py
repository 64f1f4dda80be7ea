import time

import pytest

from jaxrl.json_text import MAX_DEPTH, parse_json


def test_values_are_those_of_json():
    assert parse_json('{"a": [1, 2.5, "]]{", null, true]}') == {"a": [1, 2.5, "]]{", None, True]}
    assert parse_json(b'"\\u00e9\\"["') == 'é"['


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 3000, "nested more than 64 deep"),
        ('{"a":' * 65 + "1" + "}" * 65, "nested more than 64 deep"),
        ("[1e400]", "1e400 is too large"),
        ("[NaN]", "NaN is no number of JSON"),
        ("-Infinity", "-Infinity is no number of JSON"),
        ("{", "Expecting"),
        ("", "Expecting"),
        (b"\xff", "utf-8"),
        ("9" * 5000, "digits"),
    ],
)
def test_what_json_does_not_have_is_a_value_error(text, message):
    with pytest.raises(ValueError, match=message):
        parse_json(text)


def test_the_depth_limit_counts_brackets_outside_of_strings():
    assert parse_json("[" * MAX_DEPTH + "]" * MAX_DEPTH) is not None
    assert parse_json('["' + "[" * 500 + '"]') == ["[" * 500]
    assert len(parse_json("[" + "[]," * 500 + "[]]")) == 501


def test_reading_is_linear_in_the_text():
    start = time.process_time()
    with pytest.raises(ValueError):
        parse_json('"' + '\\"' * 500_000 + "[" * 500_000)
    assert time.process_time() - start < 2.0
