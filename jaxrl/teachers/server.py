"""Requests to the server of a teacher, with retries where another attempt may help."""

import http.client
import json
import os
import time
import urllib.error
import urllib.request

from jaxrl.config.keys import TeacherEndpointConfig
from jaxrl.json_text import Json
from jaxrl.rewards.verifiers.remote import may_pass

FIRST_WAIT_S = 0.5  # before the second attempt; doubled for each further one
_MAX_BYTES = 1 << 30  # of a reply
_PIECE = 1 << 16
_MAX_SHOWN = 300  # characters of a reply in an error message


class TeacherRequestFailed(Exception):
    """A request without a reply that can be used."""

    def __init__(self, reason: str, *, status: int = 0, final: bool = False):
        super().__init__(reason)
        self.status, self.final = status, final


class Server:
    """Sends JSON to one server."""

    def __init__(self, url: str, cfg: TeacherEndpointConfig):
        """Raises ValueError if the environment has no API key."""
        self.url, self._cfg = url.rstrip("/"), cfg
        self._headers = {"Content-Type": "application/json"}
        if name := cfg.api_key_env:
            if not (value := os.environ.get(name)):
                raise ValueError(
                    f"config.teacher_endpoint.api_key_env={name!r} is not in the environment; "
                    "set it to the server's API key"
                )
            self._headers["Authorization"] = f"Bearer {value}"

    @property
    def root(self) -> str:
        """The URL without the version of OpenAI's API."""
        return self.url.removesuffix("/v1")

    def send(self, url: str, body: Json | None = None) -> bytes:
        """The reply to a POST of `body`, or to a GET.

        Raises TeacherRequestFailed after all attempts.
        """
        for attempt in range(self._cfg.attempts):
            if attempt:
                time.sleep(FIRST_WAIT_S * 2 ** (attempt - 1))
            try:
                return self._once(url, body)
            except TeacherRequestFailed as error:
                if error.final or attempt + 1 == self._cfg.attempts:
                    raise
        raise AssertionError("teacher_endpoint.attempts is at least 1")

    def _once(self, url: str, body: Json | None) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, self._headers)
        end = time.monotonic() + self._cfg.timeout_s
        try:
            with urllib.request.urlopen(request, timeout=self._cfg.timeout_s) as reply:
                return _read(reply, end)
        except urllib.error.HTTPError as error:
            text = error.read(_MAX_SHOWN).decode(errors="replace")
            raise TeacherRequestFailed(
                f"{url} returned status {error.code}: {text}",
                status=error.code,
                final=not may_pass(error.code),
            ) from error
        except (OSError, http.client.HTTPException) as error:
            raise TeacherRequestFailed(f"{url}: {error or type(error).__name__}") from error


def _read(reply: http.client.HTTPResponse, end: float) -> bytes:
    """The body of a reply, which must be complete at `end`: a socket's limit is for each read."""
    pieces, size = [], 0
    while piece := reply.read1(_PIECE):
        pieces.append(piece)
        size += len(piece)
        if time.monotonic() > end:
            raise TimeoutError("the reply is not complete within teacher_endpoint.timeout_s")
        if size > _MAX_BYTES:
            raise TeacherRequestFailed(f"the reply is longer than {_MAX_BYTES} bytes", final=True)
    return b"".join(pieces)
