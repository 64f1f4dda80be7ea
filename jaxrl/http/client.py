"""JSON requests to other servers: a reply, or a failure that says whether a retry may help."""

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any, Literal

from jaxrl.json_text import parse_json

Kind = Literal["timeout", "unreachable", "status", "refusal", "invalid"]

FIRST_WAIT_S = 0.5  # before the second attempt; doubled for each further one
_PIECE = 1 << 16  # bytes of a reply that are read at once
_MAX_SHOWN = 300  # characters of a reply in an error message
_TRANSIENT = (408, 425, 429)  # HTTP statuses below 500 that are worth a retry


class RequestFailed(Exception):
    """A request without a usable reply: the kind of failure, and what the server sent."""

    def __init__(
        self, kind: Kind, reason: str, *, status: int = 0, body: bytes = b"", final: bool = False
    ):
        """`final` failures are not worth a retry; a `status` of 0 is none."""
        super().__init__(reason)
        self.kind, self.status, self.body, self.final = kind, status, body, final


class JsonSender:
    """Sends JSON and limits the time and the size of replies."""

    def __init__(self, *, api_key: str = "", cookies: bool = False, max_bytes: int = 1 << 24):
        """`cookies` keeps those of the servers, as the session of a browser does."""
        self._max_bytes = max_bytes
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        handlers = [urllib.request.HTTPCookieProcessor()] if cookies else []
        self._opener = urllib.request.build_opener(*handlers)

    def send(self, url: str, body: Any = None, *, timeout_s: float | None) -> bytes:
        """The reply to a POST of `body`, or to a GET without one.

        Raises RequestFailed, also for a reply that is not complete within `timeout_s`.
        """
        if timeout_s is not None and timeout_s <= 0:
            raise RequestFailed("timeout", f"no time for a request to {url}")
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, self._headers)
        end = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            with self._opener.open(request, timeout=timeout_s) as reply:
                return self._read(reply, end)
        except urllib.error.HTTPError as error:
            raise self._status_failure(url, error, end) from error
        except (OSError, http.client.HTTPException) as error:
            cause = error.reason if isinstance(error, urllib.error.URLError) else error
            if isinstance(cause, TimeoutError):
                reason = f"{url} sent no reply within {timeout_s:g} s"
                raise RequestFailed("timeout", reason) from error
            reason = f"{url}: {error or type(error).__name__}"
            raise RequestFailed("unreachable", reason) from error

    def _read(self, reply: http.client.HTTPResponse, end: float | None) -> bytes:
        """The body of a reply. The socket's time limit is for each read, `end` for all of them."""
        pieces, size = [], 0
        while piece := reply.read1(_PIECE):
            pieces.append(piece)
            size += len(piece)
            if end is not None and time.monotonic() > end:
                raise TimeoutError("the reply is not complete")
            if size > self._max_bytes:
                reason = f"the reply is longer than {self._max_bytes} bytes"
                raise RequestFailed("invalid", reason, final=True)
        if reply.length:
            raise http.client.IncompleteRead(b"", reply.length)
        return b"".join(pieces)

    def _status_failure(
        self, url: str, error: urllib.error.HTTPError, end: float | None
    ) -> RequestFailed:
        body = b""
        with error:
            try:
                if isinstance(error.fp, http.client.HTTPResponse):
                    body = self._read(error.fp, end)
            except (OSError, http.client.HTTPException, RequestFailed):
                pass  # the status is known
        reason = f"{url} returned status {error.code} {error.reason}".rstrip()
        if message := _message(body):
            reason += f" ({message})"
        may_pass = error.code >= 500 or error.code in _TRANSIENT
        return RequestFailed("status", reason, status=error.code, body=body, final=not may_pass)


def with_retries[T](
    send: Callable[[int], T],
    *,
    attempts: int,
    first_wait_s: float,
    end: float = float("inf"),
) -> T:
    """The result of `send(attempt)`, which is called again after a failure that may pass.

    `attempts` is at least 1. Waits `first_wait_s` seconds, doubled each time; no attempt starts
    after the time `end`. Raises the last RequestFailed.
    """
    attempt = 0
    while True:
        try:
            return send(attempt)
        except RequestFailed as error:
            attempt += 1
            if error.final or attempt == attempts:
                raise
            time.sleep(max(0.0, min(first_wait_s * 2 ** (attempt - 1), end - time.monotonic())))
            if time.monotonic() >= end:
                raise


def _message(body: bytes) -> str:
    """The message of an error in OpenAI's format, or the start of its body."""
    try:
        error = parse_json(body)["error"]
        message = error if isinstance(error, str) else error["message"]
    except (ValueError, LookupError, TypeError):
        message = body.decode(errors="replace")
    return str(message)[:_MAX_SHOWN]
