"""Environments behind a server of OpenEnv (https://github.com/meta-pytorch/OpenEnv).

An episode is one session of its WebSocket protocol, at /ws: {"type": "reset" | "step", "data": ...}
is answered with {"type": "observation", "data": {"observation", "reward", "done"}} or an error.
"""

import contextlib
import importlib
import json
import time
from typing import Any

from jaxrl.config.packages import install_advice
from jaxrl.environments.api import StepResult
from jaxrl.http.client import JsonSender, RequestFailed
from jaxrl.json_text import Message, parse_json

_TIMEOUT_S = 30.0  # of the request for the schema; env.timeout_s limits resets and steps
_MAX_BYTES = 1 << 24  # of a message
_FULL_WAIT_S = 0.5  # before another attempt at a server without a free session


class OpenEnv:
    """The model reads observations as text and writes an action, in a session per episode.

    `action` is the field of the action that gets the text of a turn; "" is the only field that is
    text, or, if the action has others, the turn itself as a JSON object. A turn that is no action
    gets the reason, costs a turn and counts in env/invalid. `observation` is the field of the
    observation that the model reads; "" is the whole observation as JSON. The prompt's messages
    come first, as instructions. `seed=False` resets without the seed of the episode. A reset waits
    for a session if the server has none that is free, until env.timeout_s ends it.
    Raises ImportError without the package websockets, ValueError if the server does not answer with
    the schema of its actions.
    """

    def __init__(self, *, url: str, action: str = "", observation: str = "", seed: bool = True):
        try:
            self._client = importlib.import_module("websockets.sync.client")
            self._closed = importlib.import_module("websockets.exceptions").ConnectionClosed
        except ImportError as error:
            raise ImportError(f"{error}; {install_advice('websockets')}") from error
        self._url, self._observation, self._seed = url.rstrip("/"), observation, seed
        self._action = action or text_field(read_schema(self._url))
        self._session: Any = None

    def reset(self, prompt: dict[str, Any]) -> list[Message]:
        given = {"seed": prompt["seed"]} if self._seed else {}
        while (data := self._open(given)) is None:
            time.sleep(_FULL_WAIT_S)
        return [*prompt["messages"], {"role": "user", "content": self._text(data)}]

    def step(self, completion: str) -> StepResult:
        try:
            action = {self._action: completion} if self._action else _json_object(completion)
            data = self._exchange("step", action)
        except InvalidAction as error:
            return f"That is no action: {error}", 0.0, False, {"invalid": 1}
        reward = data.get("reward")
        return self._text(data), 0.0 if reward is None else float(reward), data.get("done") is True

    def _open(self, given: dict[str, Any]) -> dict[str, Any] | None:
        """The data of a new session's reset; None if the server has no free session."""
        address = self._url.replace("http", "ws", 1) + "/ws"
        self._session = self._client.connect(address, max_size=_MAX_BYTES, proxy=None)
        try:
            return self._exchange("reset", given)
        except NoFreeSession:
            self._session.close()
            return None

    def _exchange(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        """The data of the server's answer.

        Raises InvalidAction, NoFreeSession, or RuntimeError for a failure.
        """
        with contextlib.suppress(self._closed):  # a session that is refused has its reason to read
            self._session.send(json.dumps({"type": kind, "data": data}))
        answer = parse_json(self._session.recv())
        match answer:
            case {"type": "observation", "data": {"observation": _} as found}:
                return found
            case {"type": "error", "data": {"code": "VALIDATION_ERROR", **rest}} if kind == "step":
                raise InvalidAction(_reasons(rest))
            case {"type": "error", "data": {"code": "CAPACITY_REACHED"}} if kind == "reset":
                raise NoFreeSession
            case {"type": "error", "data": {"message": message}}:
                raise RuntimeError(f"the server of OpenEnv failed: {message}")
        raise RuntimeError(f"the server of OpenEnv sent {json.dumps(answer)[:200]}")

    def _text(self, data: dict[str, Any]) -> str:
        """The observation as the model reads it. Raises RuntimeError if its field is missing."""
        found = data["observation"]
        if not self._observation:
            return json.dumps(found, ensure_ascii=False)
        if not isinstance(found, dict) or self._observation not in found:
            raise RuntimeError(
                f"the observation has no field {self._observation!r} but {list(found)}; set "
                "another one with observation=..."
            )
        value = found[self._observation]
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


class InvalidAction(ValueError):
    """The turn is no action of the environment."""


class NoFreeSession(RuntimeError):
    """The server has as many sessions as it allows."""


def read_schema(url: str) -> dict[str, Any]:
    """The JSON schema of the server's actions. Raises ValueError if it has none."""
    try:
        found = parse_json(JsonSender().send(f"{url}/schema", timeout_s=_TIMEOUT_S))
    except (RequestFailed, ValueError) as error:
        raise ValueError(
            f"{url}/schema does not answer as a server of OpenEnv does ({error}); start the "
            "server, and set url=http://HOST:PORT"
        ) from error
    match found:
        case {"action": {"properties": dict()} as schema}:
            return schema
    raise ValueError(f"{url}/schema has no schema of actions; is it a server of OpenEnv?")


def text_field(schema: dict[str, Any]) -> str:
    """The only field of an action, if it is text; "" if a turn must be a JSON object."""
    fields = {n: s for n, s in schema["properties"].items() if n != "metadata"}
    return next(iter(fields)) if [f.get("type") for f in fields.values()] == ["string"] else ""


def _reasons(data: dict[str, Any]) -> str:
    """The faults of an action's fields, by the errors of pydantic in an answer."""
    found = [
        f"{'.'.join(map(str, one['loc']))}: {one['msg']}"
        for one in data.get("errors") or ()
        if isinstance(one, dict) and one.keys() >= {"loc", "msg"}
    ]
    return "; ".join(found) or json.dumps(data)


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = parse_json(text[text.find("{") : text.rfind("}") + 1])
    except ValueError as error:
        raise InvalidAction(f"{error}. Write a JSON object.") from error
    if not isinstance(value, dict):
        raise InvalidAction("Write a JSON object.")
    return value
