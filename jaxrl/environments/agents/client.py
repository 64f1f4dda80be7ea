"""JSON over HTTP, with the cookies of a session, for agents that are a part of jaxrl."""

import urllib.parse
from typing import Any

from jaxrl.environments.api import CONTEXT_CODE, TURNS_CODE
from jaxrl.http.client import JsonSender, RequestFailed
from jaxrl.json_text import parse_json


class JsonClient:
    """Sends JSON to a server and keeps its cookies. The time limits of an episode limit it, too."""

    def __init__(self, url: str, *, api_key: str = ""):
        self._url = url.rstrip("/")
        self._sender = JsonSender(api_key=api_key, cookies=True)

    def post(self, name: str, body: Any) -> tuple[int, str]:
        """(status, text) of the answer to a POST of `body` to /`name`, whose "/" are quoted.

        Raises ConnectionError if there is none.
        """
        address = f"{self._url}/{urllib.parse.quote(name, safe='')}"
        try:
            return 200, self._sender.send(address, body, timeout_s=None).decode(errors="replace")
        except RequestFailed as error:
            if not error.status:
                raise ConnectionError(f"{address} does not answer ({error})") from error
            return error.status, error.body.decode(errors="replace")

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
