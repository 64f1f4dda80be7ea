"""Content and tool calls of a response, from its text as it grows."""

import dataclasses
import secrets
from collections.abc import Iterator
from typing import Any

from jaxrl.json_text import parse_json
from jaxrl.serve.structured.tools import ToolUse
from jaxrl.tool_calls.calls import ToolCall, openai_form
from jaxrl.tool_calls.parser import ToolParser


@dataclasses.dataclass(frozen=True)
class ToolDelta:
    """The part of a response that a piece of text adds."""

    content: str
    calls: tuple[dict[str, Any], ...]  # in OpenAI's form, with their index in the response
    n_malformed: int  # calls that could not be read; their text is content


class ToolOutput:
    """The content and the calls of one choice."""

    def __init__(self, use: ToolUse):
        self.n_calls = 0
        self._use = use
        self._json = ""  # text so far, if a grammar demands a call
        self._parser = None
        if use.format is not None:
            self._parser = ToolParser(
                use.format, tools=use.tools, ids=_call_ids(), in_thought=use.in_thought
            )

    def add(self, text: str, *, ended: bool) -> ToolDelta:
        """Adds text; `ended` if no more follows.

        A call is returned when it is complete. The text of a malformed call is content.
        """
        if self._parser is None:
            self._json += text
            n_malformed = 0
            content, calls = self._read_json() if ended else ("", [])
        else:
            content, calls, n_malformed = self._parse(self._parser, text, ended=ended)
        if not self._use.parallel:
            calls = calls[: 1 - self.n_calls]
        numbered = [{"index": i} | openai_form(call) for i, call in enumerate(calls, self.n_calls)]
        self.n_calls += len(calls)
        return ToolDelta(content, tuple(numbered), n_malformed)

    def finish_reason(self, reason: str) -> str:
        """The finish reason in OpenAI's API; `reason` is the engine's."""
        called = self.n_calls and reason == "stop" and self._use.mode != "named"
        return "tool_calls" if called else reason

    def _parse(
        self, parser: ToolParser, text: str, *, ended: bool
    ) -> tuple[str, list[ToolCall], int]:
        """Content, calls and the number of malformed calls that the text adds."""
        turns = [parser.add(text), *([parser.finish()] if ended else [])]
        attempts = [attempt for turn in turns for attempt in turn.attempts]
        calls = [a for a in attempts if isinstance(a, ToolCall)]
        content = "".join(turn.content for turn in turns)
        return content, calls, len(attempts) - len(calls)

    def _read_json(self) -> tuple[str, list[ToolCall]]:
        """The calls that a grammar demanded; the text as content if it ended too early."""
        try:
            value = parse_json(self._json)
        except ValueError:
            return self._json, []
        calls = value
        if self._use.mode == "named":
            calls = [{"name": self._use.name, "arguments": value}]
        ids = _call_ids()
        return "", [ToolCall(call["name"], call["arguments"], next(ids)) for call in calls]


def _call_ids() -> Iterator[str]:
    """Ids of nine letters and digits, which Mistral's templates require."""
    while True:
        yield secrets.token_hex(5)[:9]
