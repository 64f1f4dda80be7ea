"""The fields tools, tool_choice and parallel_tool_calls of a request."""

import dataclasses
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from jaxrl.http.errors import RequestError
from jaxrl.serve.structured.grammar import GrammarCompiler, JsonGrammar, missing_compiler
from jaxrl.tool_calls.formats import FORMATS, ToolFormat, tool_format
from jaxrl.tool_calls.schema import check_tool

MAX_TOOLS = 128  # as in OpenAI's API
MAX_TOOLS_BYTES = 128 << 10  # checking the schemas takes 4 s per MiB
MAX_CALLS = 16  # of one response with tool_choice "required"
# Special tokens within a call or a turn, in addition to the markers of a format.
INNER_MARKERS = (
    *("[ARGS]", "[CALL_ID]", "<｜tool▁sep｜>", "<think>", "</think>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<|tool_call_argument_begin|>"),
    *("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>"),
)
ToolJson = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class ToolUse:
    """The tools of a request, and how calls are read from the text of a response."""

    tools: tuple[ToolJson, ...]
    mode: Literal["auto", "required", "named"]
    parallel: bool  # whether a response may have several calls
    name: str = ""  # of the function, in the mode "named"
    format: ToolFormat | None = None  # of calls, in the mode "auto"
    in_thought: bool = False  # the prompt ends with an open <think>

    def grammar(self, compiler: GrammarCompiler | None) -> JsonGrammar | None:
        """The grammar of responses that must call a tool: JSON in any format of the model.

        A named function's arguments, or a list of {"name", "arguments"}. Raises RequestError (400).
        """
        if self.mode == "auto":
            return None
        if compiler is None:
            raise missing_compiler("tool_choice")
        if self.mode == "named":
            [tool] = [t for t in self.tools if t["function"]["name"] == self.name]
            return compiler.compile(_arguments_schema(tool), param="tools")
        calls = {
            "type": "array",
            "minItems": 1,
            "maxItems": MAX_CALLS if self.parallel else 1,
            "items": {"anyOf": [_call_schema(i, tool) for i, tool in enumerate(self.tools)]},
        }
        return compiler.compile(calls, param="tools")

    def kept_ids(self, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
        """The special tokens that calls are made of, which the text of a response must have."""
        if self.format is None:
            return frozenset()
        own = (self.format.opening, self.format.closing, *self.format.ignored)
        return token_ids(tokenizer, (*own, *INNER_MARKERS))


def token_ids(tokenizer: PreTrainedTokenizerBase, markers: Collection[str]) -> frozenset[int]:
    """The ids of those markers that are special tokens."""
    ids = zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True)
    return frozenset(token_id for token, token_id in ids if token in markers)


def known_format(template: str, name: str) -> ToolFormat | None:
    """The format of a model's tool calls; None if "auto" does not find it in the template.

    Raises ValueError for an unknown name.
    """
    try:
        return tool_format(template, name)
    except ValueError:
        if name == "auto":
            return None
        raise


def read_tools(
    body: Mapping[str, Any], known: ToolFormat | None, *, parallel: bool
) -> ToolUse | None:
    """The tools of a body; None if it has none, or with tool_choice "none".

    Raises RequestError (400) with the name of the field that is invalid.
    """
    tools = check_tools(body.get("tools"))
    names = [tool["function"]["name"] for tool in tools]
    mode, name = _choice(body.get("tool_choice"), names)
    if not tools or mode == "none":
        return None
    if mode == "auto" and known is None:
        raise RequestError(
            400,
            "the format of this model's tool calls is unknown; start the server with "
            f"--tool-format, one of {', '.join(FORMATS)}, or set tool_choice to required",
            param="tools",
        )
    if body.get("response_format") not in (None, {"type": "text"}):
        raise RequestError(
            400,
            "response_format decides the whole response, so that no tool can be called; set "
            "tool_choice to none or leave one of them out",
            param="response_format",
        )
    return ToolUse(tools, mode, parallel, name, known if mode == "auto" else None)


def check_tools(value: Any) -> tuple[ToolJson, ...]:
    """The tools of a body. Raises RequestError (400) if they are invalid or too many."""
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        raise RequestError(400, f"tools must be a list of up to {MAX_TOOLS} tools", param="tools")
    if (n_bytes := len(json.dumps(value))) > MAX_TOOLS_BYTES:
        raise RequestError(
            400,
            f"tools have {n_bytes} bytes, at most {MAX_TOOLS_BYTES} are accepted",
            param="tools",
        )
    tools = []
    for i, tool in enumerate(value):
        try:
            tools.append(check_tool(tool))
        except ValueError as error:
            raise RequestError(400, str(error), param=f"tools[{i}]") from error
    names = [tool["function"]["name"] for tool in tools]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise RequestError(400, f"two tools have the name {repeated[0]!r}", param="tools")
    return tuple(tools)


def _choice(
    value: Any, names: Sequence[str]
) -> tuple[Literal["none", "auto", "required", "named"], str]:
    """(mode, name of the function)."""
    if value is None:
        return "auto", ""
    if value in ("none", "auto") or (value == "required" and names):
        return value, ""
    function = value.get("function") if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if isinstance(name, str) and name in names:
        return "named", name
    raise RequestError(
        400,
        'tool_choice must be none, auto, required or {"type": "function", "function": {"name": '
        f"...}}}}; the request has the tools: {', '.join(names)[:500] or 'none'}",
        param="tool_choice",
    )


def _call_schema(i: int, tool: ToolJson) -> dict[str, Any]:
    # The $id keeps references within the parameters, such as "#/$defs/x", relative to them.
    arguments = {"$id": f"tool:{i}", **_arguments_schema(tool)}
    return {
        "type": "object",
        "properties": {"name": {"const": tool["function"]["name"]}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _arguments_schema(tool: ToolJson) -> dict[str, Any]:
    """The parameters, with no further arguments unless the schema mentions them."""
    schema = {"type": "object", "properties": {}} | (tool["function"].get("parameters") or {})
    if not {"$ref", "additionalProperties", "patternProperties"} & set(schema):
        schema["additionalProperties"] = False
    return schema
