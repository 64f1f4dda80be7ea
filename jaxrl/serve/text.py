"""The text of a response while its tokens come: whole characters only, cut at stop strings."""

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
UNFINISHED = "\ufffd"  # what a tokenizer writes for the first bytes of a character


class Detokenizer:
    """Pieces of text that together are the text of all tokens.

    A character may take several tokens, so what ends within one waits for the next token. Some
    tokenizers write a token differently at the start of a text, so tokens are decoded behind those
    of the piece before.
    """

    def __init__(self, decode: Decode):
        self._decode = decode
        self._tokens: list[int] = []  # those of the last piece, and those that wait
        self._n_before, self._before = 0, ""  # the last piece's tokens, and their text

    def add(self, tokens: Sequence[int]) -> str:
        """The text that these tokens complete; "" within a character."""
        self._tokens += tokens
        text = self._decode(self._tokens)
        if len(text) <= len(self._before) or text.endswith(UNFINISHED):
            return ""
        piece = text[len(self._before) :]
        self._tokens = self._tokens[self._n_before :]
        self._n_before, self._before = len(self._tokens), self._decode(self._tokens)
        return piece

    def end(self) -> str:
        """What is left: the start of a character that never ended."""
        return self._decode(self._tokens)[len(self._before) :]


def text_offsets(decode: Decode, tokens: Sequence[int]) -> list[int]:
    """Where in the text of all tokens each of them begins, in characters."""
    detokenizer, offsets, n_chars = Detokenizer(decode), [], 0
    for token in tokens:
        offsets.append(n_chars)
        n_chars += len(detokenizer.add([token]))
    return offsets


class StopStrings:
    """Lets text through up to one of some strings, which it keeps to itself.

    The end of the text is held back as long as a stop string could begin with it.
    """

    def __init__(self, strings: Sequence[str]):
        self._strings = strings
        self._held = ""
        self.found = False

    def add(self, piece: str) -> str:
        """The text that may go out; the last of it where a string is complete. The first to be complete
        counts, the longest of those that end together."""
        text = self._held + piece
        found = [(i + len(s), i) for s in self._strings if (i := text.find(s)) >= 0]
        if found:
            self.found, self._held = True, ""
            return text[: min(found)[1]]
        n = self._n_held(text)
        self._held = text[len(text) - n :]
        return text[: len(text) - n]

    def end(self) -> str:
        """What was held back for a string that did not come."""
        return self._held

    def _n_held(self, text: str) -> int:
        longest = max((len(s) for s in self._strings), default=1) - 1
        for n in range(min(longest, len(text)), 0, -1):
            if any(s.startswith(text[-n:]) for s in self._strings):
                return n
        return 0
