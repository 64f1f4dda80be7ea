"""The tools of an episode: what an environment offers, and the calls of a turn.

Whatever a call does, its result is a message of the role "tool": a result, or an error that the
model reads. Errors are counted by their kind.
"""

import asyncio
import contextlib
import inspect
import json
import signal
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from jaxrl.config.user_code import exception_text
from jaxrl.data.images.references import has_images
from jaxrl.environments.api import (
    Environment,
    StepLimits,
    StepResult,
    Tool,
    ToolEnvironment,
    ToolResult,
)
from jaxrl.json_text import Message
from jaxrl.tool_calls.calls import MalformedCall, ParsedTurn, ToolCall
from jaxrl.tool_calls.functions import function_schema
from jaxrl.tool_calls.schema import arguments_error, check_tool

COUNTS = (
    "calls",  # all, with those that are not run
    "malformed_calls",
    "unknown_tools",
    "invalid_arguments",
    "tool_errors",  # a tool that raises
    "tool_timeouts",
    "excess_calls",  # beyond env.max_calls_per_turn
)


CHECK_CPU_S = 1.0  # CPU time of comparing the arguments of a call with the tool's schema


class _NotRun(Exception):
    """A call without a result: the name in COUNTS, and the reason."""


class _CallTimeout(BaseException):
    """Interrupts a tool; no Exception, which the tool may catch."""


def environment_tools(environment: Environment) -> dict[str, Tool]:
    """The tools of an environment by name; {} if it has none.

    Raises ValueError for an invalid tool, and for two of one name.
    """
    if not isinstance(environment, ToolEnvironment):
        return {}
    tools = [_as_tool(value, environment) for value in environment.tools]
    by_name = {tool.schema["function"]["name"]: tool for tool in tools}
    if len(by_name) < len(tools):
        names = [tool.schema["function"]["name"] for tool in tools]
        raise ValueError(f"two tools have the same name: {', '.join(names)}")
    return by_name


def offered_schemas(tools: dict[str, Tool], row: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tools that the template renders: the ones in the dataset's row, or else all.

    Raises ValueError if the environment lacks a tool of the row.
    """
    if not row or not tools:
        return [tool.schema for tool in tools.values()]
    names = [tool["function"]["name"] for tool in row]
    if missing := [name for name in names if name not in tools]:
        raise ValueError(
            f"the row offers the tools {', '.join(names)}, and the environment has no "
            f"{', '.join(missing)}; it has {', '.join(tools)}"
        )
    return row


def run_calls(
    turn: ParsedTurn, tools: dict[str, Tool], offered: list[dict[str, Any]], limits: StepLimits
) -> StepResult:
    """Runs the calls of a turn in their order. Returns what `step` returns.

    `offered` are the tools that the model was shown; their schemas decide on the arguments.
    """
    schemas = {tool["function"]["name"]: tool for tool in offered}
    messages: list[Message] = []
    counts: dict[str, float] = dict.fromkeys(COUNTS, 0.0)
    reward, done = 0.0, False
    for i, attempt in enumerate(turn.attempts):
        counts["calls"] += 1
        try:
            if i >= limits.calls_per_turn:
                raise _NotRun("excess_calls", f"a turn may have {limits.calls_per_turn} tool calls")
            result = _run(attempt, tools, schemas, limits.tool_timeout_s)
            content = _content(result.content, limits.result_chars)
        except _NotRun as failure:
            kind, reason = failure.args
            result, content = ToolResult("", counts={kind: 1}), _utf8(f"error: {reason}")
        for name, number in result.counts.items():
            counts[name] = counts.get(name, 0.0) + number
        reward, done = reward + result.reward, done or result.done
        messages.append(_message(attempt, content))
    return messages, reward, done, counts


def _run(
    attempt: ToolCall | MalformedCall,
    tools: dict[str, Tool],
    schemas: dict[str, dict[str, Any]],
    timeout_s: float,
) -> ToolResult:
    """The result of one call. Raises _NotRun with the reason if there is none."""
    if isinstance(attempt, MalformedCall):
        raise _NotRun("malformed_calls", f"malformed tool call: {attempt.reason}")
    if attempt.name not in schemas:
        raise _NotRun(
            "unknown_tools",
            f"there is no tool {attempt.name!r}; the tools are {', '.join(schemas)}",
        )
    if reason := _wrong_arguments(schemas[attempt.name], attempt.arguments):
        raise _NotRun("invalid_arguments", f"wrong arguments of {attempt.name}: {reason}")
    try:
        with _interrupt_after(timeout_s):
            result = _call(tools[attempt.name], attempt.arguments)
    except _CallTimeout as error:
        raise _NotRun(
            "tool_timeouts", f"{attempt.name} took more than {timeout_s:g} s and was stopped"
        ) from error
    except BaseException as error:  # the user's code may raise anything, SystemExit too
        raise _NotRun("tool_errors", exception_text(error)) from error
    return result if isinstance(result, ToolResult) else ToolResult(result)


def _wrong_arguments(schema: dict[str, Any], arguments: dict[str, Any]) -> str:
    """Why the arguments do not fit the schema, or cannot be compared with it in time; "" if so."""
    try:
        with _interrupt_after_cpu(CHECK_CPU_S):
            return arguments_error(schema, arguments)
    except _CallTimeout:
        return f"their comparison with the schema of the tool takes over {CHECK_CPU_S:g} s"


def _call(tool: Tool, arguments: dict[str, Any]) -> Any:
    value = tool.run(**arguments)
    return asyncio.run(_awaited(value)) if inspect.isawaitable(value) else value


async def _awaited(value: Any) -> Any:
    return await value


def _content(content: Any, max_chars: int) -> str | list[Any]:
    """A result for the model: text and content parts with images as they are, others as JSON.

    Text has at most `max_chars` characters, all parts together.
    """
    if not has_images(content):
        text = content if isinstance(content, str) else _json(content)
        return _utf8(_cut(text, max_chars))
    parts = []
    for part in content:
        if isinstance(part, Mapping) and isinstance(text := part.get("text"), str):
            part = {**part, "text": _utf8(_cut(text, max_chars))}
            max_chars = max(max_chars - len(text), 0)
        parts.append(part)
    return parts


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _cut(text: str, max_chars: int) -> str:
    n_cut = len(text) - max_chars
    return text if n_cut <= 0 else f"{text[:max_chars]}... ({n_cut} more characters)"


def _utf8(text: str) -> str:
    """The text with half of a surrogate pair, which is no text, replaced."""
    return text.encode(errors="replace").decode()


def _message(attempt: ToolCall | MalformedCall, content: str | list[Any]) -> Message:
    message = {"role": "tool", "content": content, "tool_call_id": attempt.id}
    return message | ({"name": attempt.name} if isinstance(attempt, ToolCall) else {})


def _as_tool(value: Any, environment: Environment) -> Tool:
    if isinstance(value, Tool):
        return Tool(check_tool(value.schema), value.run)
    if callable(value):
        return Tool(function_schema(value), value)
    schema = check_tool(value)
    name = schema["function"]["name"]
    method = getattr(environment, name, None)
    if not callable(method):
        raise ValueError(
            f"the tool {name!r} has a schema, and {type(environment).__name__} has no method of "
            "that name to run it"
        )
    return Tool(schema, method)


@contextlib.contextmanager
def _interrupt_after_cpu(seconds: float) -> Iterator[None]:
    """Raises _CallTimeout in the block after `seconds` of CPU time.

    A timer thread cannot do this: a regular expression holds the interpreter's lock while it
    matches, but handles signals of the kernel.
    """

    def interrupt(*_: object) -> None:
        raise _CallTimeout

    signal.signal(signal.SIGVTALRM, interrupt)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, signal.SIG_IGN)


@contextlib.contextmanager
def _interrupt_after(seconds: float) -> Iterator[None]:
    """Raises _CallTimeout in the block after `seconds`. C code that does not return runs on.

    SIGALRM limits the whole step, so a timer thread sends another signal to the main thread.
    """
    armed = True

    def interrupt(*_: object) -> None:
        if armed:
            raise _CallTimeout

    signal.signal(signal.SIGUSR1, interrupt)
    timer = threading.Timer(seconds, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR1))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        armed = False
        timer.cancel()
        timer.join()
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
