"""Request bodies: bounded reading, and JSON whose size and depth are checked."""

import collections
import contextlib
import json
import math
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import ClientDisconnect, Request

from jaxrl import json_text
from jaxrl.http.errors import RequestError

SMALL_BYTES = 64 << 10  # bodies up to here do not count against the total
MAX_DEPTH = 32  # of nested arrays and objects


class BodyReader:
    """Reads request bodies into memory, within limits of each body and of all of them together.

    Only large bodies count against the total, so that clients who send them slowly do not keep
    others from sending small ones.
    """

    def __init__(self, max_bytes: int, max_total_bytes: int):
        self._max_bytes, self._max_total_bytes = max_bytes, max_total_bytes
        self._total_bytes = 0

    @contextlib.asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """The body of a request, which counts against the total until the context ends.

        Raises RequestError: 413 if it is too large, 429 if all bodies together are, 499 if the
        client disconnects.
        """
        if int(request.headers.get("content-length", 0)) > self._max_bytes:
            raise self._too_large()
        body, n_counted = bytearray(), 0
        try:
            async for chunk in request.stream():
                body += chunk
                if len(body) > self._max_bytes:
                    raise self._too_large()
                if len(body) > SMALL_BYTES:
                    self._count(len(body) - n_counted)
                    n_counted = len(body)
            yield bytes(body)
        except ClientDisconnect as error:
            raise client_disconnected() from error
        finally:
            self._total_bytes -= n_counted

    def _count(self, n_bytes: int) -> None:
        if self._total_bytes + n_bytes > self._max_total_bytes:
            raise RequestError(
                429,
                f"the server reads bodies of {self._max_total_bytes >> 20} MiB together at most; "
                "try again later",
                code="overloaded",
            )
        self._total_bytes += n_bytes

    def _too_large(self) -> RequestError:
        return RequestError(
            413,
            f"the body of a request may have {self._max_bytes >> 20} MiB; send several requests",
            code="request_too_large",
        )


def client_disconnected() -> RequestError:
    """Never received by the client; 499 is the status that proxies log."""
    return RequestError(499, "the client disconnected")


def parse_json(raw: bytes, *, max_values: int) -> Any:
    """The value of a JSON text in UTF-8.

    Raises RequestError (400) for what `json_text.parse_json` does not accept, text outside of
    Unicode, repeated names, and more than `max_values` values. Commas and brackets in strings count
    as values too, so that the count takes no time.
    """
    try:
        text = raw.decode()
        if sum(map(text.count, ",[{")) > max_values:
            raise ValueError(f"more than {max_values} values; send several requests")
        value = json_text.parse_json(
            text, max_depth=MAX_DEPTH, object_pairs_hook=_unique, parse_int=_integer
        )
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()  # fails for half a surrogate pair
    except ValueError as error:
        raise RequestError(
            400, f"the body of the request is not accepted as JSON: {error}"
        ) from error
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        [(name, _)] = collections.Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the name {name[:64]!a} is repeated in an object")
    return fields


def _integer(digits: str) -> int:
    """An integer that a float can hold: sampling and scores compute with floats."""
    if not math.isfinite(float(digits)):
        raise ValueError(f"the number {digits[:40]} is too large")
    return int(digits)
