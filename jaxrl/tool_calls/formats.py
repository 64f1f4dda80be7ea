"""Formats in which models write tool calls, and which of them a chat template teaches.

hermes    <tool_call>{"name": ..., "arguments": {...}}</tool_call>, once per call (Hermes, Qwen)
llama3    {"name": ..., "parameters": {...}} as the whole turn, or after <|python_tag|>; joined
          by ";"
mistral   [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], or since version 11 of its
          tokenizer [TOOL_CALLS]name[ARGS]{...}, once per call
deepseek  <｜tool▁call▁begin｜>...<｜tool▁call▁end｜>: "function<｜tool▁sep｜>name" and the
          arguments in a code block (V3, R1), or "name<｜tool▁sep｜>{...}" (V3.1)
qwen3_coder  <tool_call> with XML in it, <function=name> and <parameter=key>, once per call
          (Qwen3-Coder, Qwen3.5); the tool's schema gives the types of the arguments
harmony   a message to a function, <|channel|>commentary to=functions.name <|constrain|>json
          <|message|>{...}<|call|>, or with its receiver before the channel (gpt-oss)
glm       <tool_call>name, <arg_key>key</arg_key><arg_value>value</arg_value> for each argument,
          </tool_call>, once per call (GLM-4.5 to 4.7); the schema gives the types
kimi      <|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}<|tool_call_end|>
          (Kimi-K2); functions.name:0 is the id of the call
gemma4    <|tool_call>call:name{key:value}<tool_call|>, once per call; strings are between <|"|>
"""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

from jaxrl.tool_calls.call_end import CallEnd
from jaxrl.tool_calls.calls import parse_json, parse_json_values, shortened
from jaxrl.tool_calls.gemma4_calls import QUOTE, THOUGHT, read_gemma4
from jaxrl.tool_calls.xml_calls import END_VALUE, VALUE, XmlCallEnd, read_glm, read_xml

_SEP = "<｜tool▁sep｜>"
_ARGUMENTS = {"parameters", "arguments"}
_KIMI_ID = re.compile(r"functions\.(\S+):\d+")
_BARE_CALL = re.compile(r'\{\s*"(?:name|type)"\s*:')


@dataclasses.dataclass(frozen=True)
class ToolFormat:
    """Markers around the calls of a turn, and the reader of the text between them."""

    name: str
    opening: str
    closing: str  # "": a call ends where the next one opens, or with the turn
    read: Callable[[str], list[Any]]  # call objects for `read_call`; raises ValueError
    ignored: tuple[str, ...] = ()  # markers around all calls of a turn
    bare: bool = False  # the whole turn may be a call without markers
    thought: tuple[str, str] = ("<think>", "</think>")  # markers of reasoning at the start
    texts: bool = False  # arguments are text; the tool's schema gives their types
    call_end: Callable[[str], CallEnd | XmlCallEnd] = CallEnd  # finds the end, by its marker
    other_opening: str = ""  # in place of `opening`


def read_hermes(text: str) -> list[Any]:
    """One call, or a list of calls as SmolLM2 writes them."""
    value = parse_json(text)
    return value if isinstance(value, list) else [value]


def read_llama3(text: str) -> list[Any]:
    """Objects that are joined by ";" or blanks."""
    return parse_json_values(text, separators="; \n\r\t")


def read_mistral(text: str) -> list[Any]:
    """A list of calls, or a name, perhaps an id, and the arguments of one call."""
    if text.lstrip().startswith("["):
        return parse_json(text)
    head, separator, arguments = text.partition("[ARGS]")
    if not separator:
        head, separator, arguments = text.partition("{")
        arguments = separator + arguments
    if not separator:
        raise ValueError("the name of the tool is not followed by arguments in braces")
    name, _, call_id = head.partition("[CALL_ID]")
    call = {"name": name.strip(), "arguments": arguments}
    return [call | ({"id": call_id.strip()} if call_id else {})]


def read_deepseek(text: str) -> list[Any]:
    """One call: the separator is between its type and its name, or its name and arguments."""
    first, separator, rest = text.partition(_SEP)
    if not separator:
        raise ValueError(f"{_SEP} is missing")
    if rest.lstrip().startswith("{"):
        return [{"name": first.strip(), "arguments": rest}]
    name, _, block = rest.partition("```")
    arguments = block.removeprefix("json").strip().removesuffix("```")
    return [{"name": name.strip(), "arguments": arguments}]


def read_harmony(text: str) -> list[Any]:
    """One call: the name, perhaps a channel and the type of the arguments, and the arguments."""
    header, separator, arguments = text.partition("<|message|>")
    if not separator:
        raise ValueError("<|message|> is missing")
    return [{"name": re.split(r"\s|<\|", header, maxsplit=1)[0], "arguments": arguments}]


def read_kimi(text: str) -> list[Any]:
    """One call: its id, functions.NAME:NUMBER, and the arguments."""
    call_id, separator, arguments = text.partition("<|tool_call_argument_begin|>")
    if not separator:
        raise ValueError("<|tool_call_argument_begin|> is missing")
    found = _KIMI_ID.fullmatch(call_id.strip())
    if not found:
        raise ValueError(f"{shortened(call_id)!r} is not functions.NAME:NUMBER")
    return [{"name": found[1], "arguments": arguments, "id": found[0]}]


FORMATS = {
    f.name: f
    for f in (
        ToolFormat("hermes", "<tool_call>", "</tool_call>", read_hermes),
        ToolFormat("llama3", "<|python_tag|>", "", read_llama3, bare=True),
        ToolFormat("mistral", "[TOOL_CALLS]", "", read_mistral),
        ToolFormat(
            "deepseek",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁call▁end｜>",
            read_deepseek,
            ignored=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        ),
        ToolFormat(
            "qwen3_coder",
            "<tool_call>",
            "</tool_call>",
            read_xml,
            texts=True,
            call_end=XmlCallEnd,
        ),
        ToolFormat(
            "harmony",
            "<|channel|>commentary to=functions.",
            "<|call|>",
            read_harmony,
            ignored=("<|start|>assistant",),
            other_opening="<|start|>assistant to=functions.",
        ),
        ToolFormat(
            "glm",
            "<tool_call>",
            "</tool_call>",
            read_glm,
            texts=True,
            call_end=functools.partial(XmlCallEnd, opening=VALUE, closing=END_VALUE),
        ),
        ToolFormat(
            "kimi",
            "<|tool_call_begin|>",
            "<|tool_call_end|>",
            read_kimi,
            ignored=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        ),
        ToolFormat(
            "gemma4",
            "<|tool_call>",
            "<tool_call|>",
            read_gemma4,
            thought=THOUGHT,
            call_end=functools.partial(XmlCallEnd, opening=QUOTE, closing=QUOTE),
        ),
    )
}


def is_bare_call(text: str) -> bool:
    """Whether a turn that starts with "{" is meant as a call: other JSON may be an answer."""
    try:
        values = read_llama3(text)
    except ValueError:
        return bool(_BARE_CALL.match(text.lstrip()))
    return all(isinstance(v, dict) and "name" in v and _ARGUMENTS & set(v) for v in values)


def tool_format(template: str, name: str = "auto") -> ToolFormat:
    """The format called `name`; "auto": the one that the chat template has the markers of.

    Raises ValueError if there is none, with the names to choose from.
    """
    if name != "auto":
        if name in FORMATS:
            return FORMATS[name]
        raise ValueError(f"the tool format {name!r} is not one of auto, {', '.join(FORMATS)}")
    if FORMATS["harmony"].closing in template and "functions." in template:
        return FORMATS["harmony"]
    if "<function=" in template:
        if "<parameter=" in template and "<tool_call>" in template:
            return FORMATS["qwen3_coder"]
    elif VALUE in template:
        if FORMATS["glm"].opening in template:
            return FORMATS["glm"]
    else:
        for name in ("gemma4", "kimi", "deepseek", "mistral", "hermes"):
            if FORMATS[name].opening in template:
                return FORMATS[name]
        if "<|start_header_id|>" in template and '"parameters"' in template:
            return FORMATS["llama3"]
    raise ValueError(
        "the chat template has the tool calls of no known format "
        f"({shortened(template)!r}); set the format by its name, one of {', '.join(FORMATS)}, or "
        "data.chat_template to a template that renders tools, such as 'chatml_tools'"
    )
