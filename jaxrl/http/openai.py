"""Parts of OpenAI's bodies that the server and the endpoint of agents read and write alike."""

import secrets
import time
from collections.abc import Mapping
from typing import Any

from jaxrl.http.body import parse_json
from jaxrl.http.errors import RequestError
from jaxrl.json_text import Json, Message
from jaxrl.tool_calls.chat_message import as_message

MAX_STOPS, MAX_STOP_LEN = 4, 256  # stop strings as in OpenAI's API, and characters of each


def read_object(raw: bytes, *, max_values: int) -> Mapping[str, Any]:
    """The fields of a body. Raises RequestError (400) unless it is a JSON object."""
    body = parse_json(raw, max_values=max_values)
    if not isinstance(body, Mapping):
        raise RequestError(400, "the body of the request must be a JSON object")
    return body


def read_messages(messages: Any) -> list[Message]:
    """Role, text and tool calls of chat messages; text parts are joined.

    Raises RequestError (400) if there are none, or for other content.
    """
    if not isinstance(messages, list) or not messages:
        raise RequestError(400, "messages must be a non-empty list", param="messages")
    return [_message(message) for message in messages]


def _message(message: Any) -> Message:
    calls = message.get("tool_calls") if isinstance(message, dict) else None
    try:
        if isinstance(calls, list | None) and (found := as_message(message)) is not None:
            return found
    except ValueError as error:
        raise RequestError(400, str(error), param="messages") from error
    raise RequestError(
        400,
        "a message needs a role and text content, or a list of tool calls; other content is not "
        "supported. Images are read by a server of an image-and-text model that was started with "
        "--config.data.images=True",
        param="messages",
    )


def read_stop(stop: Any) -> tuple[str, ...]:
    """The stop strings of a body. Raises RequestError (400) if they are invalid."""
    strings = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not isinstance(strings, list) or not all(isinstance(s, str) and s for s in strings):
        raise RequestError(400, "stop must be a non-empty string or a list of them", param="stop")
    if len(strings) > MAX_STOPS or max(map(len, strings), default=0) > MAX_STOP_LEN:
        raise RequestError(
            400,
            f"stop accepts at most {MAX_STOPS} strings of at most {MAX_STOP_LEN} characters",
            param="stop",
        )
    return tuple(strings)


def response_head(kind: str, model: str) -> Json:
    """The first fields of a response: "chat.completion", its chunks, or "text_completion"."""
    prefix = "chatcmpl" if kind.startswith("chat") else "cmpl"
    name = f"{prefix}-{secrets.token_hex(12)}"
    return {"id": name, "object": kind, "created": int(time.time()), "model": model}


def usage(n_prompt: int, n_response: int) -> Json:
    """The token counts of a response."""
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_response,
        "total_tokens": n_prompt + n_response,
    }
