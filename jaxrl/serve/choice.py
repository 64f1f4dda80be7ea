"""One choice of a response: tokens, logprobs, detokenized text, stop strings, finish reason."""

import dataclasses
from collections.abc import Callable, Sequence

from jaxrl.engine.api import Generated

Decode = Callable[[Sequence[int]], str]
TopLogprobs = list[tuple[int, float]]  # (token id, logprob)
REPLACEMENT = "\ufffd"  # what a tokenizer decodes an incomplete UTF-8 character to


@dataclasses.dataclass(frozen=True)
class Delta:
    """What one dispatch of the engine adds to a choice."""

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
        decode: Decode,
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
        step = 1 if self._by_token else max(n_visible, 1)
        for i in range(0, n_visible, step):
            part = slice(i, min(i + step, n_visible))
            self._append(tokens[part], generated.logp[part].tolist())
            piece = self._detokenizer.add(tokens[part])
            self._n_chars += len(piece)
            early = len(self.tokens) <= self._min_tokens
            self.text += piece if early else self._stop.add(piece)
            if self._stop.found:
                self.finish_reason = "stop"
                break
        else:
            self._append(tokens[n_visible:], generated.logp[n_visible:].tolist())
            if generated.finish:
                self._finish(generated.finish)
        return Delta(self.text[n_text:], first_token)

    def _append(self, tokens: list[int], logp: list[float]) -> None:
        self.tokens += tokens
        self.logp += logp
        self.offsets += [self._n_chars] * len(tokens)

    def _finish(self, reason: str) -> None:
        self.text += self._stop.add(self._detokenizer.flush())
        if self._stop.found:
            reason = "stop"
        else:
            self.text += self._stop.flush()
        self.finish_reason = reason


class Detokenizer:
    """Incremental detokenization: the pieces concatenate to the text of all tokens.

    A character may span several tokens, so text that ends inside one is held back until the next
    token. Some tokenizers decode a token differently at the start of a text, so new tokens are
    decoded together with those of the previous piece.
    """

    def __init__(self, decode: Decode):
        self._decode = decode
        self._tokens: list[int] = []  # tokens of the previous piece, and pending ones
        self._n_previous, self._previous = 0, ""  # number of tokens and text of the previous piece

    def add(self, tokens: Sequence[int]) -> str:
        """The text that these tokens complete; "" inside a character."""
        self._tokens += tokens
        text = self._decode(self._tokens)
        if len(text) <= len(self._previous) or text.endswith(REPLACEMENT):
            return ""
        piece = text[len(self._previous) :]
        self._tokens = self._tokens[self._n_previous :]
        self._n_previous, self._previous = len(self._tokens), self._decode(self._tokens)
        return piece

    def flush(self) -> str:
        """The pending text: the start of a character that was never completed."""
        return self._decode(self._tokens)[len(self._previous) :]


def text_offsets(decode: Decode, tokens: Sequence[int]) -> list[int]:
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
        self.found = False

    def add(self, piece: str) -> str:
        """The text that can be emitted; the last of it if a stop string is complete.

        The string that completes first counts, and the longest of those that end together.
        """
        text = self._held + piece
        found = [(i + len(s), i) for s in self._strings if (i := text.find(s)) >= 0]
        if found:
            self.found, self._held = True, ""
            return text[: min(found)[1]]
        n = self._n_held(text)
        self._held = text[len(text) - n :]
        return text[: len(text) - n]

    def flush(self) -> str:
        """The text held back for a stop string that was never completed."""
        return self._held

    def _n_held(self, text: str) -> int:
        longest = max((len(s) for s in self._strings), default=1) - 1
        for n in range(min(longest, len(text)), 0, -1):
            if any(s.startswith(text[-n:]) for s in self._strings):
                return n
        return 0
