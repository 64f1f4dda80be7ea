"""One choice of a response: tokens, logprobs, detokenized text, stop strings, finish reason."""

import dataclasses
from collections.abc import Callable, Sequence

from jaxrl.data.token_text import REPLACEMENT
from jaxrl.engine.api import Generated

Detokenize = Callable[[Sequence[int]], str]
TopLogprobs = list[tuple[int, float]]  # (token id, logprob)
MAX_CHARACTER = 4  # bytes, and so tokens, of a character
MAX_PENDING = 4 * MAX_CHARACTER  # tokens whose text is held back


@dataclasses.dataclass(frozen=True)
class Delta:
    """The part of a choice that one dispatch of the engine adds."""

    text: str
    first_token: int  # index in the choice of the delta's first token


class Choice:
    """Accumulates the engine's output, up to the token that completes a stop string.

    With `by_token`, `offsets` has the position of every token in the text, in characters. Stop
    strings are searched in the text after the first `min_tokens` tokens.
    """

    def __init__(
        self,
        index: int,
        decode: Detokenize,
        stop: Sequence[str],
        *,
        by_token: bool,
        min_tokens: int = 0,
    ):
        self.index = index
        self.text = ""
        self.tokens: list[int] = []  # including the end-of-sequence token
        self.logp: list[float] = []
        self.top: list[TopLogprobs] = []  # by token, most likely first; empty if not requested
        self.offsets: list[int] = []
        self.finish_reason = ""  # "stop" | "length" | "" while generating
        self._detokenizer, self._stop = Detokenizer(decode), StopStrings(stop)
        self._by_token, self._min_tokens = by_token or bool(stop), min_tokens
        self._n_chars = 0  # decoded so far, including text held back for a stop string

    def add(self, generated: Generated) -> Delta:
        """Appends the output of one dispatch."""
        first_token, n_text = len(self.tokens), len(self.text)
        if (top := generated.top) is not None:
            rows = zip(top.ids.tolist(), top.logp.tolist(), strict=True)
            self.top += [list(zip(*row, strict=True)) for row in rows]
        tokens = generated.tokens.tolist()
        n_visible = len(tokens) - (generated.finish == "stop")  # the stop token has no text
        step, pieces = 1 if self._by_token else max(n_visible, 1), []
        for i in range(0, n_visible, step):
            part = slice(i, min(i + step, n_visible))
            self._append(tokens[part], generated.logp[part].tolist())
            piece = self._detokenizer.add(tokens[part])
            self._n_chars += len(piece)
            early = len(self.tokens) <= self._min_tokens
            pieces.append(piece if early else self._stop.add(piece))
            if self._stop.found:
                self.finish_reason = "stop"
                break
        else:
            self._append(tokens[n_visible:], generated.logp[n_visible:].tolist())
            if generated.finish:
                pieces.append(self._finish(generated.finish))
        self.text += "".join(pieces)
        return Delta(self.text[n_text:], first_token)

    @property
    def stop_string(self) -> str:
        """The stop string that ended the choice, or ""."""
        return self._stop.found

    def _append(self, tokens: list[int], logp: list[float]) -> None:
        self.tokens += tokens
        self.logp += logp
        self.offsets += [self._n_chars] * len(tokens)

    def _finish(self, reason: str) -> str:
        """Ends the choice; the text that was held back."""
        held = self._stop.add(self._detokenizer.flush())
        self.finish_reason = "stop" if self._stop.found else reason
        return held if self._stop.found else held + self._stop.flush()


class Detokenizer:
    """Incremental detokenization: the pieces concatenate to the text of all tokens.

    A character may span several tokens, so text that ends inside one is held back until the next
    token. Some tokenizers decode a token differently at the start of a text, so new tokens are
    decoded together with the previous piece's tokens. At most MAX_PENDING tokens are pending, so
    that every call takes the same time, also for bytes that never make a character.
    """

    def __init__(self, decode: Detokenize):
        self._decode = decode
        self._tokens: list[int] = []  # tokens of the previous piece, and pending ones
        self._n_previous, self._previous = 0, ""  # number of tokens and text of the previous piece

    def add(self, tokens: Sequence[int]) -> str:
        """The text that these tokens complete; "" inside a character."""
        self._tokens += tokens
        text = self._decode(self._tokens)
        n_pending = len(self._tokens) - self._n_previous
        if self._is_complete(text):
            return self._take(text, n_pending)
        return self._take_part(text, n_pending) if n_pending > MAX_PENDING else ""

    def flush(self) -> str:
        """The pending text: the start of a character that was never completed."""
        return self._decode(self._tokens)[len(self._previous) :]

    def _take(self, text: str, n_tokens: int) -> str:
        """The new piece of `text`: what the tokens up to the first `n_tokens` pending ones add."""
        piece, end = text[len(self._previous) :], self._n_previous + n_tokens
        taken, pending = self._tokens[self._n_previous : end], self._tokens[end:]
        self._n_previous, self._previous = n_tokens, self._decode(taken)
        self._tokens = taken + pending
        return piece

    def _take_part(self, text: str, n_pending: int) -> str:
        """A piece that leaves the tokens of at most one character pending."""
        if len(text) <= len(self._previous):  # tokens without text
            del self._tokens[self._n_previous : -MAX_CHARACTER]
            return ""
        heads = {n: self._decode(self._tokens[:-n]) for n in range(1, MAX_CHARACTER + 1)}
        for n, head in heads.items():
            if self._is_complete(head):
                return self._take(head, n_pending - n)
        for n, head in heads.items():
            tail = self._decode(self._tokens[-n:])
            if tail and len(head) + len(tail) == len(text):  # a character begins with the tail
                return self._take(head, n_pending - n)
        return self._take(text, n_pending)

    def _is_complete(self, text: str) -> bool:
        return len(text) > len(self._previous) and not text.endswith(REPLACEMENT)


def text_offsets(decode: Detokenize, tokens: Sequence[int]) -> list[int]:
    """Start of each token in the decoded text, in characters."""
    detokenizer, offsets, n_chars = Detokenizer(decode), [], 0
    for token in tokens:
        offsets.append(n_chars)
        n_chars += len(detokenizer.add([token]))
    return offsets


class StopStrings:
    """Passes text through up to the first stop string, which is dropped.

    Holds back the end of the text as long as a stop string could begin there.
    """

    def __init__(self, strings: Sequence[str]):
        self._strings = strings
        self._held = ""
        self.found = ""  # the stop string that is complete

    def add(self, piece: str) -> str:
        """The text that can be emitted; the last of it if a stop string is complete.

        The string that completes first counts, and the longest of those that end together.
        """
        text = self._held + piece
        found = [(i + len(s), i) for s in self._strings if (i := text.find(s)) >= 0]
        if found:
            end, start = min(found)
            self.found, self._held = text[start:end], ""
            return text[:start]
        n = self._n_held(text)
        self._held = text[len(text) - n :]
        return text[: len(text) - n]

    def flush(self) -> str:
        """The text held back for a stop string that was never completed."""
        return self._held

    def _n_held(self, text: str) -> int:
        """Characters at the end of the text that begin a stop string."""
        return max((_n_begun(string, text) for string in self._strings), default=0)


def _n_begun(string: str, text: str) -> int:
    """The longest end of the text that is a proper beginning of the string."""
    start = text.find(string[0], max(0, len(text) - len(string) + 1))
    while start >= 0 and not string.startswith(text[start:]):
        start = text.find(string[0], start + 1)
    return len(text) - start if start >= 0 else 0
