"""Messages as datasets write them, in the form of OpenAI's API.

ShareGPT has `from` and `value`, and roles such as human, gpt, function_call and observation. Fields
such as `weight` and `train` say which assistant turns are learned.
"""

from collections.abc import Mapping
from typing import Any

from jaxrl.json_text import parse_json, shown

_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function": "tool",
    "function_response": "tool",
}
_KNOWN_ROLES = {"system", "developer", "user", "assistant", "tool", "ipython"}
# Whether a turn is learned: OpenAI's name, axolotl's names, ms-swift's name, and a mask of 0 and 1
LEARNED_FIELDS = ("weight", "train", "training", "loss", "loss_mask")
_READ = {
    *("role", "content", "from", "value", "name", "tool_calls", "tool_call_id", "function_call"),
    *("reasoning_content", "reasoning", "thinking"),
}
_NEUTRAL = {"id", "index", "idx", "timestamp", "type"}


def canonical(message: Any) -> Any:
    """The message with OpenAI's role names and its call in `tool_calls`; other values unchanged.

    Raises ValueError for a ShareGPT message whose role is unknown, or whose call is not JSON.
    """
    if not isinstance(message, Mapping):
        return message
    role = role_of(message)
    found = {k: v for k, v in message.items() if k not in ("from", "value", "function_call")}
    if message.get("role") is None and isinstance(message.get("from"), str):
        found["content"] = message.get("value")
        if role not in _KNOWN_ROLES:
            raise ValueError(
                f"the role {message['from']!r} is none of {', '.join(sorted(_KNOWN_ROLES))}, "
                f"{', '.join(sorted(_ROLES))}; correct the row"
            )
    if _name_of_role(message) == "function_call":
        return found | {"role": role, "content": "", "tool_calls": _calls(found.get("content"))}
    if call := message.get("function_call"):  # OpenAI's form before tool_calls
        found["tool_calls"] = [call]
        found["content"] = found.get("content") or ""
    return found if role is None else found | {"role": role}


def role_of(message: Mapping[str, Any]) -> str | None:
    """The message's role under OpenAI's name; None if it has none."""
    name = _name_of_role(message)
    return _ROLES.get(name, name) if name is not None else None


def is_learned(message: Mapping[str, Any]) -> bool:
    """Whether the fields of an assistant turn leave it in the loss; true for other messages.

    Raises ValueError for a field that is neither true (1) nor false (0).
    """
    if role_of(message) != "assistant":
        return True
    for name in LEARNED_FIELDS:
        value = message.get(name)
        if value is None or value in (0, 1):  # True, 1 and 1.0 are equal
            continue
        raise ValueError(
            f"a message has {name}={shown(value)}; only 1 (or true) and 0 (or false) are read. "
            "Correct the row, or remove the field"
        )
    return all(message.get(name) is None or message[name] for name in LEARNED_FIELDS)


def unread_fields(messages: Any, *, learns: bool) -> set[str]:
    """Fields of the messages in a column that no reader uses, and roles that are not known.

    `learns`: the fields of assistant turns that say whether they are learned are read.
    """
    found: set[str] = set()
    for message in messages if isinstance(messages, list) else ():
        if not isinstance(message, Mapping):
            continue
        role = role_of(message)
        for name, value in message.items():
            if value is None or name in _READ or name in _NEUTRAL:
                continue
            if name not in LEARNED_FIELDS or not learns:
                found.add(name)
            elif role != "assistant" and value:
                found.add(f"{name} of {role} turns")
        if role is not None and role not in _KNOWN_ROLES:
            found.add(f"role {role}")
    return found


def ends_with_answer(value: Any) -> bool:
    """Whether a column is a list of messages whose last one is an assistant turn."""
    last = value[-1] if isinstance(value, list) and value else None
    return isinstance(last, Mapping) and role_of(last) == "assistant"


def _name_of_role(message: Mapping[str, Any]) -> str | None:
    name = message.get("role", message.get("from"))
    name = message.get("from") if name is None else name
    return name if isinstance(name, str) else None


def _calls(content: Any) -> list[Any]:
    """The calls of a function_call turn: JSON text of one call, or of a list of calls."""
    try:
        calls = parse_json(content) if isinstance(content, str) else content
    except ValueError as error:
        raise ValueError(
            f"the function_call {shown(content)} is not JSON ({error}); correct the row"
        ) from error
    return calls if isinstance(calls, list) else [calls]
