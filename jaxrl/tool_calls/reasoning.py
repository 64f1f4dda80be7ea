"""Separates the reasoning at the start of a model turn from its answer, piece by piece."""

THINK = ("<think>", "</think>")


class ReasoningSplitter:
    """Incremental: the results of `add` concatenate to the reasoning and the content.

    The markers, and blanks next to them, are in neither. `in_thought`: the prompt opens the
    reasoning. A turn without reasoning is content as it is written.
    """

    def __init__(self, markers: tuple[str, str] = THINK, *, in_thought: bool = False):
        self._opening, self._closing = markers
        self._mode = "thought" if in_thought else "start"  # or "answer", "content"
        self._text = ""  # not yet returned
        self._begun = False  # whether the reasoning has characters

    def add(self, text: str, *, ended: bool = False) -> tuple[str, str]:
        """(reasoning, content) that the text adds; `ended` if no more follows."""
        self._text += text
        if self._mode == "start":
            self._read_start(ended=ended)
        reasoning = self._read_thought(ended=ended) if self._mode == "thought" else ""
        if self._mode == "answer":  # blanks after the reasoning
            self._text = self._text.lstrip()
            self._mode = "content" if self._text else "answer"
        if self._mode != "content":
            return reasoning, ""
        content, self._text = self._text, ""
        return reasoning, content

    def _read_start(self, *, ended: bool) -> None:
        first = self._text.lstrip()
        if first.startswith(self._opening):
            self._mode, self._text = "thought", first[len(self._opening) :]
        elif ended or not self._opening.startswith(first):
            self._mode = "content"

    def _read_thought(self, *, ended: bool) -> str:
        if not self._begun:
            self._text = self._text.lstrip()
        end = self._text.find(self._closing)
        if end >= 0:
            taken, self._text = self._text[:end].rstrip(), self._text[end + len(self._closing) :]
            self._mode = "answer"
            return taken
        n_held = 0 if ended else _n_begun(self._closing, self._text)
        taken = self._text[: len(self._text) - n_held].rstrip()
        self._text = self._text[len(taken) :]
        self._begun = self._begun or bool(taken)
        return taken


def split_reasoning(
    text: str, markers: tuple[str, str] = THINK, *, in_thought: bool = False
) -> tuple[str, str]:
    """(reasoning, content) of a whole turn."""
    return ReasoningSplitter(markers, in_thought=in_thought).add(text, ended=True)


def _n_begun(marker: str, text: str) -> int:
    """Characters at the end of the text with which the marker could begin."""
    longest = min(len(marker) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if marker.startswith(text[-n:])), 0)
