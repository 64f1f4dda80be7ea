"""Reading request bodies and parsing their JSON: jaxrl/http/body.py."""

import asyncio
import json

import pytest
from starlette.requests import Request

from jaxrl.http.body import MAX_DEPTH, SMALL_BYTES, BodyReader, parse_json
from jaxrl.http.errors import RequestError

MIB = 1 << 20
MALFORMED = {
    "no JSON": b"{",
    "empty": b"",
    "NaN": b'{"temperature": NaN}',
    "Infinity": b'{"temperature": -Infinity}',
    "repeated name": b'{"n": 1, "prompt": "x", "n": 2}',
    "repeated name inside": b'{"stream_options": {"a": 1, "a": 1}}',
    "repeated name of half a pair": rb'{"\ud800": 1, "\ud800": 2}',
    "half a pair": rb'{"prompt": "\ud800"}',
    "invalid UTF-8": b'{"prompt": "\xff"}',
    "encoded half pair": b'{"prompt": "\xed\xa0\x80"}',
    "UTF-16": '{"prompt": "x"}'.encode("utf-16"),
    "byte order mark": b'\xef\xbb\xbf{"prompt": "x"}',
    "null byte": b'{"prompt": "\x00"}',
    "digits": b'{"seed": ' + b"1" * 5000 + b"}",
    "400 digits": b'{"reward": -' + b"1" * 400 + b"}",
    "too large for a float": b'{"reward": -1e999}',
    "deep arrays": b"[" * 50_000 + b"]" * 50_000,
    "deep objects": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    "one level too deep": b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1),
    "open brackets": b"[" * MIB,
    "many values": b"[" + b"[]," * 1001 + b"[]]",
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_json_is_an_error_of_the_request(name):
    with pytest.raises(RequestError, match="not accepted as JSON") as rejected:
        parse_json(MALFORMED[name], max_values=1000)
    assert rejected.value.status == 400
    json.dumps(rejected.value.body(), ensure_ascii=False).encode()


def test_valid_json_is_parsed():
    value = {"a": ["b\n", 1, 2.5, None, True, {"é": "😀"}], "c": {}}
    for ascii_only in (False, True):  # with and without escapes of characters
        raw = json.dumps(value, ensure_ascii=ascii_only).encode()
        assert parse_json(raw, max_values=100) == value
    deepest = b"[" * MAX_DEPTH + b"]" * MAX_DEPTH
    assert json.dumps(parse_json(deepest, max_values=100)).encode() == deepest


def request(chunks, headers=()):
    """A request whose body arrives in chunks; the client disconnects where a chunk is None."""
    parts = iter(chunks)

    async def receive():
        part = next(parts, b"")
        if part is None:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": part, "more_body": bool(part)}

    return Request({"type": "http", "headers": list(headers)}, receive)


def read(reader, *args):
    async def run():
        async with reader.read(request(*args)) as body:
            return body

    return asyncio.run(run())


@pytest.mark.parametrize("headers", [(), [(b"content-length", b"3145728")]])
def test_a_body_above_the_limit_gets_413(headers):
    reader, chunks = BodyReader(2 * MIB, 8 * MIB), iter([b"x" * MIB] * 3)
    with pytest.raises(RequestError, match="may have 2 MiB") as rejected:
        read(reader, chunks, headers)
    assert rejected.value.status == 413
    assert len(list(chunks)) == (3 if headers else 0)  # rejected before it is read, if declared
    assert read(reader, [b"x" * MIB, b"y" * MIB]) == b"x" * MIB + b"y" * MIB


def test_large_bodies_share_a_limit_and_small_ones_are_always_read():
    reader = BodyReader(2 * MIB, 3 * MIB)

    async def run():
        async with reader.read(request([b"x" * 2 * MIB])):
            with pytest.raises(RequestError, match="3 MiB together") as rejected:
                async with reader.read(request([b"x" * 2 * MIB])):
                    pass
            assert rejected.value.status == 429
            async with reader.read(request([b"y" * SMALL_BYTES])) as body:
                assert len(body) == SMALL_BYTES
        async with reader.read(request([b"x" * 2 * MIB])):  # the first has been released
            pass
        with pytest.raises(RequestError) as left:
            async with reader.read(request([b"x" * MIB, None])):
                pass
        assert left.value.status == 499

    asyncio.run(run())
    assert reader._total_bytes == 0
