"""Request bodies of Anthropic's Messages API, as the chat requests that they are equivalent to."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrl.http.errors import RequestError
from jaxrl.http.fields import unknown_field, unsupported_field
from jaxrl.json_text import Json

EXTENSIONS = (  # fields of chat completions that Anthropic's API does not have
    "chat_template_kwargs",
    "frequency_penalty",
    "logit_bias",
    "min_p",
    "min_tokens",
    "presence_penalty",
    "repetition_penalty",
    "seed",
)
SAME = ("model", "max_tokens", "stream", "temperature", "top_k", "top_p", *EXTENSIONS)
OTHER = ("messages", "stop_sequences", "system", "tool_choice", "tools")
READ = ("output_config", "thinking")  # checked, see _check_thinking and _response_format
IGNORED = ("cache_control", "inference_geo", "metadata", "service_tier")
KEEP_THINKING = {"type": "clear_thinking_20251015", "keep": "all"}
NO_EFFECT: dict[str, tuple[Any, ...]] = {  # unsupported fields, with the values that are accepted
    "container": (),
    "context_management": ({}, {"edits": []}, {"edits": [KEEP_THINKING]}),
    "diagnostics": (),
    "mcp_servers": ([],),
    "speed": ("standard",),
}
COUNTED = ("model", "chat_template_kwargs", "messages", "system", "tool_choice", "tools", *READ)
THINKING = ("adaptive", "disabled", "enabled")
TOOL_FIELDS = ("type", "name", "description", "input_schema", "cache_control")
TOOL_NO_EFFECT: dict[str, tuple[Any, ...]] = {
    "allowed_callers": (["direct"],),
    "defer_loading": (False,),
    "eager_input_streaming": (False, True),
    "input_examples": ([],),
    "strict": (False,),
}
BLOCK_FIELDS = {  # besides type; blocks of other types are rejected
    "text": ("text", "cache_control"),
    "image": ("source", "cache_control"),
    "thinking": ("thinking", "signature"),
    "tool_use": ("id", "name", "input", "cache_control", "caller"),
    "tool_result": ("tool_use_id", "content", "is_error", "cache_control"),
}


def chat_of_messages(body: Mapping[str, Any]) -> Json:
    """The body of a chat completion with the meaning of a body of /v1/messages.

    Its messages have the thinking blocks as `reasoning_content`. Raises RequestError (400) with the
    name of a field that has no equivalent.
    """
    body = _checked(body, (*SAME, *OTHER, *READ))
    if "max_tokens" not in body:
        raise _invalid("max_tokens", "is missing: set the largest number of tokens of the reply")
    return _chat_body(body)


def chat_of_count(body: Mapping[str, Any]) -> Json:
    """The same for a body of /v1/messages/count_tokens."""
    return _chat_body(_checked(body, COUNTED))


def _checked(body: Mapping[str, Any], known: Sequence[str]) -> Json:
    """The fields that are set. Raises RequestError for those that are not in `known`."""
    present = {name: value for name, value in body.items() if value is not None}
    for name, value in list(present.items()):
        if name in NO_EFFECT and value not in NO_EFFECT[name]:
            raise unsupported_field(name)
        if name in NO_EFFECT or name in IGNORED:
            del present[name]
        elif name not in known:
            raise unknown_field(name, known)
    _check_thinking(present.get("thinking"))
    return present


def _check_thinking(thinking: Any) -> None:
    """The chat template decides whether the model reasons, so that no value has an effect."""
    if thinking is None or (isinstance(thinking, dict) and thinking.get("type") in THINKING):
        return
    raise _invalid("thinking", f"must be an object with a type of {', '.join(THINKING)}")


def _chat_body(body: Json) -> Json:
    chat = {name: body[name] for name in SAME if name in body}
    chat["messages"] = _messages(body.get("system"), body.get("messages"))
    if "stop_sequences" in body:
        chat["stop"] = body["stop_sequences"]
    if "tools" in body:
        chat["tools"] = _tools(body["tools"])
    if "tool_choice" in body:
        chat |= _tool_choice(body["tool_choice"])
    if (chosen := _response_format(body.get("output_config"))) is not None:
        chat["response_format"] = chosen
    return chat


def _messages(system: Any, messages: Any) -> list[Json]:
    found: list[Json] = []
    if system:
        found.append({"role": "system", "content": _parts(system, "system", ("text",))})
    if not isinstance(messages, list) or not messages:
        raise _invalid("messages", "must be a non-empty list")
    for i, message in enumerate(messages):
        place = f"messages[{i}]"
        role = str(message.get("role")) if isinstance(message, dict) else ""
        if role not in ROLES or set(message) - {"role", "content"}:
            raise _invalid(
                place, f"must be an object of a role of {', '.join(ROLES)} and its content"
            )
        found += ROLES[role](message.get("content"), place)
    if messages[-1]["role"] == "assistant":
        raise _invalid(
            "messages", "end with a message of the assistant, and a reply cannot be prefilled"
        )
    return found


def _system(content: Any, place: str) -> list[Json]:
    return [{"role": "system", "content": _parts(content, place, ("text",))}]


def _user(content: Any, place: str) -> list[Json]:
    """The results of tools as messages, and the parts between them."""
    blocks = _blocks(content, place, ("text", "image", "tool_result"))
    found: list[Json] = []
    for i, block in enumerate(blocks):
        if block["type"] == "tool_result":
            inner = block.get("content") or ""
            result = _parts(inner, f"{place}.content[{i}]", ("text", "image"))
            call_id = block.get("tool_use_id")
            found.append({"role": "tool", "content": result, "tool_call_id": call_id})
        else:
            if not found or found[-1]["role"] != "user":
                found.append({"role": "user", "content": []})
            found[-1]["content"].append(_part(block))
    return found or [{"role": "user", "content": ""}]


def _assistant(content: Any, place: str) -> list[Json]:
    blocks = _blocks(content, place, ("text", "thinking", "tool_use"))
    texts = [block["text"] for block in blocks if block["type"] == "text"]
    message: Json = {"role": "assistant", "content": "".join(texts)}
    thoughts = [b.get("thinking") for b in blocks if b["type"] == "thinking"]
    if not all(isinstance(thought, str) for thought in thoughts):
        raise _invalid(place, "has a thinking block without text")
    if reasoning := "".join(filter(None, thoughts)):
        message["reasoning_content"] = reasoning
    if calls := [_call(block) for block in blocks if block["type"] == "tool_use"]:
        message["tool_calls"] = calls
    return [message]


ROLES: dict[str, Callable[[Any, str], list[Json]]] = {
    "user": _user,
    "assistant": _assistant,
    "system": _system,
}


def _call(block: Json) -> Json:
    function = {"name": block.get("name"), "arguments": block.get("input")}
    return {"id": block.get("id"), "type": "function", "function": function}


def _parts(content: Any, place: str, kinds: Sequence[str]) -> str | list[Json]:
    if isinstance(content, str):
        return content
    return [_part(block) for block in _blocks(content, place, kinds)]


def _part(block: Json) -> Json:
    """A block of text or an image as a content part of a chat message."""
    if block["type"] == "text":
        return {"type": "text", "text": block["text"]}
    source = block.get("source")
    source = source if isinstance(source, dict) else {}
    if source.get("type") == "base64":
        url = f"data:{source.get('media_type')};base64,{source.get('data')}"
    elif source.get("type") == "url":
        url = source.get("url")
    else:
        raise _invalid("messages", "have an image whose source is neither base64 nor a url")
    return {"type": "image_url", "image_url": {"url": url}}


def _blocks(content: Any, place: str, kinds: Sequence[str]) -> list[Json]:
    """The blocks of a content. Raises RequestError for other types and fields."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise _invalid(place, "needs a content of text or a list of blocks")
    for i, block in enumerate(content):
        kind = str(block.get("type")) if isinstance(block, dict) else ""
        if kind not in kinds:
            shown = json.dumps(kind)[:64]
            raise _invalid(
                place, f"has a block of the type {shown} at {i}; accepted are {', '.join(kinds)}"
            )
        unknown = [k for k, v in block.items() if v is not None and k not in BLOCK_FIELDS[kind]]
        if unknown := [name for name in unknown if name != "type"]:
            raise _invalid(place, f"has a {kind} block with {unknown[0][:64]!r}, which is not read")
        if kind == "text" and not isinstance(block.get("text"), str):
            raise _invalid(place, f"has a text block without text at {i}")
    return content


def _tools(tools: Any) -> Any:
    """Tools in the form of chat completions, whose endpoint checks the rest."""
    return [_tool(tool, i) for i, tool in enumerate(tools)] if isinstance(tools, list) else tools


def _tool(tool: Any, i: int) -> Any:
    place = f"tools[{i}]"
    if not isinstance(tool, dict):
        raise _invalid(place, "must be an object")
    if tool.get("type") not in (None, "custom"):
        shown = json.dumps(tool["type"])[:64]
        raise _invalid(place, f"has the type {shown}; only tools of the client are supported")
    for name, value in tool.items():
        no_effect = value is None or value in TOOL_NO_EFFECT.get(name, ())
        if name not in TOOL_FIELDS and not no_effect:
            raise _invalid(place, f"has {name[:64]!r}, which is not supported; leave it out")
    names = {"name": "name", "description": "description", "input_schema": "parameters"}
    function = {new: tool[old] for old, new in names.items() if tool.get(old) is not None}
    return {"type": "function", "function": function}


def _tool_choice(choice: Any) -> Json:
    """The fields tool_choice and parallel_tool_calls of a chat completion."""
    kind = choice.get("type") if isinstance(choice, dict) else None
    chosen: Any = {"auto": "auto", "any": "required", "none": "none"}.get(str(kind))
    if kind == "tool":
        chosen = {"type": "function", "function": {"name": choice.get("name")}}
    single = isinstance(choice, dict) and choice.get("disable_parallel_tool_use", False)
    if chosen is None or not isinstance(single, bool):
        raise _invalid("tool_choice", "must be an object with the type auto, any, tool or none")
    return {"tool_choice": chosen} | ({"parallel_tool_calls": False} if single else {})


def _response_format(config: Any) -> Any:
    """`output_config.format` as a response_format."""
    if config is None:
        return None
    if not isinstance(config, dict) or set(config) - {"effort", "format"}:
        raise _invalid("output_config", 'must be an object: {"format": {"type": "json_schema"}}')
    if config.get("effort") is not None:
        raise _invalid(
            "output_config.effort", "is not supported; set an argument of the chat template"
        )
    chosen = config.get("format")
    if isinstance(chosen, dict) and chosen.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": {"name": "reply"} | chosen}
    return chosen


def _invalid(name: str, reason: str) -> RequestError:
    return RequestError(400, f"{name} {reason}", param=name)
