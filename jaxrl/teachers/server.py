"""Requests to the server of a teacher, with retries where another attempt may help."""

import os

from jaxrl.config.keys import TeacherEndpointConfig
from jaxrl.http.client import FIRST_WAIT_S, JsonSender, with_retries
from jaxrl.json_text import Json

_MAX_BYTES = 1 << 30  # of a reply


class Server:
    """Sends JSON to one server."""

    def __init__(self, url: str, cfg: TeacherEndpointConfig):
        """Raises ValueError if the environment has no API key."""
        self.url, self._cfg = url.rstrip("/"), cfg
        key = ""
        if (name := cfg.api_key_env) and not (key := os.environ.get(name, "")):
            raise ValueError(
                f"config.teacher_endpoint.api_key_env={name!r} is not in the environment; "
                "set it to the server's API key"
            )
        self._sender = JsonSender(api_key=key, max_bytes=_MAX_BYTES)

    @property
    def root(self) -> str:
        """The URL without the version of OpenAI's API."""
        return self.url.removesuffix("/v1")

    def send(self, url: str, body: Json | None = None) -> bytes:
        """The reply to a POST of `body`, or to a GET.

        Raises RequestFailed after all attempts.
        """
        return with_retries(
            lambda _: self._sender.send(url, body, timeout_s=self._cfg.timeout_s),
            attempts=self._cfg.attempts,
            first_wait_s=FIRST_WAIT_S,
        )
