"""What an episode's process sends to the trainer, and its validation: a `Turn` as JSON."""

import dataclasses
import math
from typing import Any

from jaxrl.environments.api import Message, Turn
from jaxrl.workers.channel import ProtocolError, is_text


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
        } if (
            math.isfinite(reward)
            and all(map(_is_finite, counts.values()))
            and all(map(is_text, [error, *counts]))
        ):
            checked = None if messages is None else [_message(message) for message in messages]
            return Turn(checked, reward, done, counts, error, rewarded)
    raise ProtocolError(f"{value!r:.80} is no turn")


def _is_finite(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value)


def _message(value: Any) -> Message:
    match value:
        case {"role": role, "content": content} if is_text(role) and is_text(content):
            return {"role": role, "content": content}
    raise ProtocolError(f"{value!r:.80} is no message")
