"""Reads tool calls from the text of a model turn, at once or piece by piece.

The text must have the special tokens of the turn, except the end-of-sequence token: Llama's and
Mistral's markers are special tokens. A call within the model's reasoning at the start of the turn,
<think>...</think> or between the format's own markers, is not a call.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxrl.tool_calls.calls import (
    MalformedCall,
    ParsedTurn,
    ToolCall,
    call_ids,
    read_call,
)
from jaxrl.tool_calls.formats import ToolFormat, is_bare_call
from jaxrl.tool_calls.xml_calls import typed_arguments

Attempts = list[ToolCall | MalformedCall]


def parse_turn(
    text: str,
    tool_format: ToolFormat,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    ids: Iterator[str] | None = None,
    in_thought: bool = False,
) -> ParsedTurn:
    """Content and calls of a turn. `in_thought`: the generation prompt opens the reasoning."""
    parser = ToolParser(tool_format, tools=tools, ids=ids, in_thought=in_thought)
    first, last = parser.add(text), parser.finish()
    return ParsedTurn(first.content + last.content, first.attempts + last.attempts)


class ToolParser:
    """Incremental parser: the results of `add` and `finish` concatenate to the whole turn.

    A call is returned when it is complete. Text is held back while a marker could begin there, and
    so are blanks, which are dropped next to calls. A malformed call stays in the content as it is
    written. `tools`, checked, are those that the model may call: their schemas give the arguments
    types in a format that writes none. `ids` names calls to which the model gives no id.
    """

    def __init__(
        self,
        tool_format: ToolFormat,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        ids: Iterator[str] | None = None,
        in_thought: bool = False,
    ):
        self._format, self._ids = tool_format, ids or call_ids()
        self._tools = tools
        self._openings = tuple(filter(None, (tool_format.opening, tool_format.other_opening)))
        self._opening = ""  # of the present call
        self._think, self._end_think = tool_format.thought
        self._markers = (*self._openings, *tool_format.ignored)
        self._marker = re.compile("|".join(map(re.escape, self._markers)))
        self._mode = "thought" if in_thought else "start"  # or "content", "call", "bare"
        self._text, self._at = "", 0  # not yet returned, and how far it has been read
        self._held = ""  # blanks and ignored markers at the end of the content
        self._after_call = False  # the content ends with a call
        self._call_end = tool_format.call_end(tool_format.closing or tool_format.opening)

    def add(self, piece: str) -> ParsedTurn:
        """The text and calls that the next piece completes."""
        self._text += piece
        return self._read(final=False)

    def finish(self) -> ParsedTurn:
        """The text that was held back. A last call without its closing marker is read as well."""
        return self._read(final=True)

    def _read(self, *, final: bool) -> ParsedTurn:
        content: list[str] = []
        attempts: Attempts = []
        while self._read_part(content, attempts, final=final):
            pass
        if final and not self._after_call:
            content.append(self._held)
            self._held = ""
        self._text, self._at = self._text[self._at :], 0
        return ParsedTurn("".join(content), tuple(attempts))

    def _read_part(self, content: list[str], attempts: Attempts, *, final: bool) -> bool:
        """Reads text of one mode. Returns whether to read on."""
        if self._mode == "call":
            return self._read_call(content, attempts, final=final)
        if self._mode == "bare":
            return self._read_bare(content, attempts, final=final)
        if self._mode == "start":
            return self._read_start(content, final=final)
        if self._mode == "thought":
            return self._read_thought(content, final=final)
        return self._read_content(content, final=final)

    def _read_start(self, content: list[str], *, final: bool) -> bool:
        """Finds out whether the turn starts with reasoning or with a call without markers."""
        first = self._text.lstrip()
        if not final and self._think.startswith(first):
            return False
        if first.startswith(self._think):
            self._take(content, self._text.find(self._think) + len(self._think))
            self._mode = "thought"
        else:
            self._mode = "bare" if self._format.bare and first.startswith("{") else "content"
        return True

    def _read_thought(self, content: list[str], *, final: bool) -> bool:
        end = self._text.find(self._end_think, self._at)
        if end < 0:
            self._take_all(content, (self._end_think,), final=final)
            return False
        self._take(content, end + len(self._end_think))
        self._mode = "content"
        return True

    def _read_content(self, content: list[str], *, final: bool) -> bool:
        """Moves text up to the next marker into `content`."""
        found = self._marker.search(self._text, self._at)
        if not found:
            self._take_all(content, self._markers, final=final)
            return False
        self._take(content, found.start())
        unread = self._text[self._at :]
        longer = any(m != unread and m.startswith(unread) for m in self._markers)
        if longer and not final:
            return False
        self._at = found.end()
        if found[0] in self._openings:
            self._mode, self._opening = "call", found[0]
            self._call_end = self._format.call_end(self._format.closing or self._format.opening)
        elif not self._after_call:
            self._held += found[0]
        return True

    def _read_call(self, content: list[str], attempts: Attempts, *, final: bool) -> bool:
        """Reads the call at this place if it is complete."""
        end = self._call_end.find(self._text, self._at, final=final)
        if end is None:
            return False
        body = self._text[self._at : end if end >= 0 else None]
        closing = self._format.closing if end >= 0 else ""
        self._at += len(body) + len(closing)
        self._mode = "content"
        self._keep(body, f"{self._opening}{body}{closing}", content, attempts)
        return True

    def _read_bare(self, content: list[str], attempts: Attempts, *, final: bool) -> bool:
        """Reads a turn that starts with "{" when it is complete."""
        if not final:
            return False
        if is_bare_call(self._text):
            self._keep(self._text, self._text, content, attempts)
            self._at = len(self._text)
        self._mode = "content"
        return self._at < len(self._text)

    def _take_all(self, content: list[str], markers: tuple[str, ...], *, final: bool) -> None:
        """Takes the rest of the text, except what may be the start of a marker."""
        unread = self._text[self._at :]
        self._take(content, len(self._text) - (0 if final else _n_held(unread, markers)))

    def _take(self, content: list[str], end: int) -> None:
        """Moves the text up to `end` into `content`, and blanks at its end into `_held`."""
        text, self._at = self._text[self._at : end], end
        if kept := text.rstrip():
            content += [self._held, kept]
            self._held, self._after_call = "", False
        self._held += text[len(kept) :]

    def _keep(self, body: str, written: str, content: list[str], attempts: Attempts) -> None:
        """Adds the calls of `body`; one that is malformed stays in `content` as `written`."""
        found = self._attempts(body)
        attempts += found
        self._after_call = all(isinstance(attempt, ToolCall) for attempt in found)
        if not self._after_call:
            content += [self._held, written]
        self._held = ""

    def _attempts(self, body: str) -> Attempts:
        """The calls in the text between two markers."""
        try:
            values = self._format.read(body)
            if not values:
                raise ValueError("there is no call between the markers")
        except ValueError as error:
            return [MalformedCall(body.strip(), str(error), next(self._ids))]
        attempts: Attempts = []
        for value in values:
            try:
                name, arguments, call_id = read_call(value)
                if self._format.texts:
                    arguments = typed_arguments(name, arguments, self._tools)
                attempts.append(ToolCall(name, arguments, call_id or next(self._ids)))
            except ValueError as error:
                attempts.append(MalformedCall(body.strip(), str(error), next(self._ids)))
        return attempts


def _n_held(text: str, markers: tuple[str, ...]) -> int:
    """Characters at the end of the text with which a marker could begin."""
    longest = min(max(map(len, markers)) - 1, len(text))
    return next(
        (n for n in range(longest, 0, -1) if any(m.startswith(text[-n:]) for m in markers)), 0
    )
