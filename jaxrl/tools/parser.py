"""Reads tool calls from the text of a model turn, at once or piece by piece.

The text must have the special tokens of the turn, except the end-of-sequence token: Llama's and
Mistral's markers are special tokens. A call within the model's reasoning (<think>...</think>) is
not a call.
"""

from collections.abc import Iterator

from jaxrl.tools.calls import (
    MalformedCall,
    ParsedTurn,
    ToolCall,
    call_ids,
    read_call,
)
from jaxrl.tools.formats import ToolFormat, is_bare_call

_THINK, _END_THINK = "<think>", "</think>"


def parse_turn(
    text: str,
    tool_format: ToolFormat,
    *,
    ids: Iterator[str] | None = None,
    in_thought: bool = False,
) -> ParsedTurn:
    """Content and calls of a whole turn. `in_thought`: the generation prompt opens <think>."""
    parser = ToolParser(tool_format, ids=ids, in_thought=in_thought)
    first, last = parser.add(text), parser.finish()
    return ParsedTurn(first.content + last.content, first.attempts + last.attempts)


class ToolParser:
    """Incremental parser: the results of `add` and `finish` concatenate to the whole turn.

    A call is returned when it is complete. Text is held back while a marker could begin there, and
    so are blanks, which are dropped next to calls. `ids` names calls to which the model gives no
    id.
    """

    def __init__(
        self,
        tool_format: ToolFormat,
        *,
        ids: Iterator[str] | None = None,
        in_thought: bool = False,
    ):
        self._format, self._ids = tool_format, ids or call_ids()
        self._mode = "thought" if in_thought else "start"  # or "content", "call", "bare"
        self._buffer = ""  # not yet read
        self._blanks = ""  # at the end of the content, held back
        self._has_calls = False

    def add(self, piece: str) -> ParsedTurn:
        """What the next piece of text completes."""
        self._buffer += piece
        return self._read(final=False)

    def finish(self) -> ParsedTurn:
        """What was held back. A last call without its closing marker is read as well."""
        return self._read(final=True)

    def _read(self, *, final: bool) -> ParsedTurn:
        content: list[str] = []
        attempts: list[ToolCall | MalformedCall] = []
        read = True
        while read:
            if self._mode == "call":
                read = self._read_call(attempts, final=final)
            elif self._mode == "bare":
                read = self._read_bare(content, attempts, final=final)
            else:
                read = self._read_content(content, final=final)
        if final and not self._has_calls:
            content.append(self._blanks)
            self._blanks = ""
        return ParsedTurn("".join(content), tuple(attempts))

    def _read_content(self, content: list[str], *, final: bool) -> bool:
        """Moves text up to the next marker into `content`. Returns whether to read on."""
        if self._mode == "start" and self._format.bare:
            first = self._buffer.lstrip()
            if not first and not final:
                return False
            if first.startswith("{"):
                self._mode = "bare"
                return True
        thought = self._mode == "thought"
        call_markers = (self._format.opening, *self._format.ignored)
        markers = (_END_THINK,) if thought else (*call_markers, _THINK)
        found = [(i, marker) for marker in markers if (i := self._buffer.find(marker)) >= 0]
        if not found:
            n_held = 0 if final else _n_held(self._buffer, markers)
            self._take_content(content, len(self._buffer) - n_held)
            return False
        start, marker = min(found)
        if marker in (_THINK, _END_THINK):
            self._take_content(content, start + len(marker))
            self._mode = "content" if thought else "thought"
            return True
        self._take_content(content, start)
        self._blanks = ""
        self._buffer = self._buffer[len(marker) :]
        self._has_calls = True
        self._mode = "call" if marker == self._format.opening else "content"
        return True

    def _take_content(self, content: list[str], n: int) -> None:
        text, self._buffer = self._blanks + self._buffer[:n], self._buffer[n:]
        kept = text.rstrip()
        self._blanks = text[len(kept) :]
        if kept:
            content.append(kept)
            if self._mode == "start":
                self._mode = "content"

    def _read_call(self, attempts: list[ToolCall | MalformedCall], *, final: bool) -> bool:
        """Reads the call at the start of the buffer. Returns False if it is not complete."""
        closing = self._format.closing
        end = self._buffer.find(closing or self._format.opening)
        if end < 0 and not final:
            return False
        body = self._buffer if end < 0 else self._buffer[:end]
        self._buffer = "" if end < 0 else self._buffer[end + len(closing) :]
        self._mode = "content"
        attempts += self._attempts(body)
        return end >= 0

    def _read_bare(
        self, content: list[str], attempts: list[ToolCall | MalformedCall], *, final: bool
    ) -> bool:
        """Reads a turn that starts with "{" when it is complete."""
        if not final:
            return False
        if is_bare_call(self._buffer):
            self._has_calls, self._blanks = True, ""
            attempts += self._attempts(self._buffer)
        else:
            content.append(self._blanks + self._buffer)
            self._blanks = ""
        self._buffer, self._mode = "", "content"
        return False

    def _attempts(self, body: str) -> list[ToolCall | MalformedCall]:
        """The calls in the text between two markers."""
        try:
            values = self._format.read(body)
            if not values:
                raise ValueError("there is no call between the markers")
        except ValueError as error:
            return [MalformedCall(body.strip(), str(error), next(self._ids))]
        attempts: list[ToolCall | MalformedCall] = []
        for value in values:
            try:
                name, arguments, call_id = read_call(value)
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
