"""Where the text of a tool call ends: at a marker that is not within a JSON string."""

import re

_STRING = re.compile(r'(?:[^"\\\x00-\x1f]|\\["\\/bfnrtu])*+')
_BLANKS = re.compile(r"[ \t\r\n]*+")
_PLAIN = re.compile(r"[\s\w,:.+-]*+")  # between the brackets and strings of an object


class CallEnd:
    """Finds the marker that ends a call: the first one that is not in a string of its objects.

    If the text before that marker cannot be JSON, or a string or an object does not end, the first
    marker of all ends the call. The time is linear in the text, however it arrives.
    """

    def __init__(self, marker: str):
        self._marker = marker
        self._brace_or_marker = re.compile(r"\{|" + re.escape(marker))
        self._only_marker = re.compile(re.escape(marker))
        self._state = "outside"  # of objects; or "object", "string", "after string", "broken"
        self._depth = 0  # open braces
        self._n_read = 0

    def find(self, text: str, start: int, *, final: bool) -> int | None:
        """Where the marker is in `text`, whose call begins at `start`; -1: nowhere.

        None if that depends on further text, which is never so if `final`.
        """
        at, before = start + self._n_read, -1
        while at < len(text) and before != (at, self._state):
            before = at, self._state
            if self._state in ("outside", "broken"):
                at, ended = self._search(text, at)
            elif self._state == "object":
                at, ended = self._read_object(text, at)
            else:
                at, ended = self._read_string(text, at), False
            if ended:
                return at
            if self._state == "broken" != before[1]:
                at = start
        self._n_read = at - start
        if not final:
            return None
        return -1 if self._state == "outside" else text.find(self._marker, start)

    def _search(self, text: str, at: int) -> tuple[int, bool]:
        """(where the next object begins or where to search on, or the marker; whether it is it)."""
        pattern = self._only_marker if self._state == "broken" else self._brace_or_marker
        found = pattern.search(text, at)
        if not found:
            return max(at, len(text) - len(self._marker) + 1), False
        if found[0] == self._marker:
            return found.start(), True
        self._state, self._depth = "object", 1
        return found.end(), False

    def _read_object(self, text: str, at: int) -> tuple[int, bool]:
        """Reads up to the next string, bracket or marker, at which the call ends."""
        at = _end(_PLAIN, text, at)
        ahead = text[at : at + len(self._marker)]
        if self._marker.startswith(ahead):
            return at, ahead == self._marker
        if text[at] == '"':
            self._state = "string"
        elif text[at] not in "{}[]":
            self._state = "broken"
        else:
            self._depth += {"{": 1, "}": -1}.get(text[at], 0)
            self._state = "object" if self._depth else "outside"
        return at + 1, False

    def _read_string(self, text: str, at: int) -> int:
        """Reads to the end of a string, or to what follows it."""
        if self._state == "after string":
            at = _end(_BLANKS, text, at)
            if at < len(text):
                self._state = "object" if text[at] in ",:]}" else "broken"
            return at
        at = _end(_STRING, text, at)
        if text[at : at + 2] in ("", "\\"):  # the end of the text, or half an escape
            return at
        self._state = "after string" if text[at] == '"' else "broken"
        return at + 1


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    return found.end() if found else at
