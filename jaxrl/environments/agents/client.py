"""JSON over HTTP, with the cookies of a session, for agents that are a part of jaxrl."""

import json
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from jaxrl.environments.api import CONTEXT_CODE, TURNS_CODE
from jaxrl.json_text import parse_json

_MAX_BYTES = 1 << 24  # of an answer


class JsonClient:
    """Sends JSON to a server and keeps its cookies. The time limits of an episode limit it, too."""

    def __init__(self, url: str, *, api_key: str = ""):
        self._url = url.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())

    def post(self, name: str, body: Any) -> tuple[int, str]:
        """(status, text) of the answer to a POST of `body` to /`name`, whose "/" are quoted.

        Raises ConnectionError if there is none.
        """
        address = f"{self._url}/{urllib.parse.quote(name, safe='')}"
        request = urllib.request.Request(address, json.dumps(body).encode(), self._headers)
        try:
            with self._opener.open(request) as reply:
                return reply.status, reply.read(_MAX_BYTES).decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read(_MAX_BYTES).decode(errors="replace")
        except OSError as error:
            raise ConnectionError(f"{address} does not answer ({error})") from error

    def ask(self, name: str, body: Any) -> dict[str, Any]:
        """The object that answers. Raises RuntimeError for an error, or another answer."""
        status, text = self.post(name, body)
        try:
            answer = parse_json(text)
        except ValueError:
            answer = None
        if status != 200 or not isinstance(answer, dict):
            raise RuntimeError(f"{self._url}/{name} answered with status {status}: {text[:500]}")
        return answer


class ModelClient:
    """The model at the endpoint of an episode."""

    def __init__(self, base_url: str, api_key: str):
        self._client = JsonClient(base_url, api_key=api_key)

    def turn(self, dialect: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """A turn of the model, by "responses"; None if the context or the turns are used up.

        Raises RuntimeError for a request that the endpoint refuses.
        """
        status, text = self._client.post(dialect, {"model": "policy"} | body)
        answer = parse_json(text)
        if status == 200:
            return answer
        if answer["error"].get("code") in (CONTEXT_CODE, TURNS_CODE):
            return None
        raise RuntimeError(f"the endpoint refused a request: {answer['error']['message']}")
