"""Messages of an episode's process to the trainer, and their validation: a `Turn` as JSON."""

import dataclasses
import json
import math
from typing import Any

from jaxrl.data.images.references import IMAGE
from jaxrl.environments.api import Turn
from jaxrl.json_text import Message
from jaxrl.rewards.calls import is_score
from jaxrl.subprocesses.channel import ProtocolError, is_text
from jaxrl.tool_calls.chat_message import as_message


def write_turn(turn: Turn) -> dict[str, Any]:
    """The turn as a JSON object."""
    return dataclasses.asdict(turn)


def read_turn(value: Any) -> Turn:
    """The turn that `write_turn` wrote. Raises ProtocolError for anything else."""
    match value:
        case {
            "messages": [*_] | None as messages,
            "reward": float(reward),
            "done": bool(done),
            "counts": dict(counts),
            "error": error,
            "rewarded": bool(rewarded),
            "tools": [*tools],
            "images": [*images],
        } if (
            is_score(reward)
            and all(map(_is_finite, counts.values()))
            and all(map(is_text, [error, *counts, *images]))
            and all(map(_is_tool, tools))
        ):
            checked = None if messages is None else [_message(message) for message in messages]
            if sum(message["content"].count(IMAGE) for message in checked or ()) != len(images):
                raise ProtocolError(f"{value!r:.80} has not {len(images)} places of images")
            return Turn(checked, reward, done, counts, error, rewarded, tools, images)
    raise ProtocolError(f"{value!r:.80} is no turn")


def _is_finite(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value)


def _is_tool(value: Any) -> bool:
    match value:
        case {"type": "function", "function": {"name": name}}:
            return is_text(name) and is_text(json.dumps(value, ensure_ascii=False))
    return False


def _message(value: Any) -> Message:
    try:
        message = as_message(value)
    except ValueError as error:
        raise ProtocolError(str(error)) from error
    if message is None or not is_text(json.dumps(message, ensure_ascii=False)):
        raise ProtocolError(f"{value!r:.80} is no message")
    return message
