"""One response as a client sees it: text, tokens, logprobs, why it ended."""

import dataclasses
from collections.abc import Sequence

from jaxrl.engine.api import Generated
from jaxrl.serve.text import Decode, Detokenizer, StopStrings


@dataclasses.dataclass(frozen=True)
class Delta:
    """What one dispatch of the engine adds to a choice."""

    text: str
    first: int  # its first token is the choice's token of this number


class Choice:
    """Grows with what the engine makes, up to the token that completes a stop string.

    With `by_token` the place in the text of every token is known: `offsets`, in characters.
    """

    def __init__(self, index: int, decode: Decode, stop: Sequence[str], *, by_token: bool):
        self.index = index
        self.text = ""
        self.tokens: list[int] = []  # the end-of-sequence token included
        self.logp: list[float] = []
        self.offsets: list[int] = []
        self.finish = ""  # "stop" | "length" | "" while it goes on
        self._detokenizer, self._stop = Detokenizer(decode), StopStrings(stop)
        self._by_token = by_token or bool(stop)
        self._n_chars = 0  # of text made, that held back included

    def take(self, made: Generated) -> Delta:
        """Takes in what a dispatch made."""
        first, n_text = len(self.tokens), len(self.text)
        tokens = made.tokens.tolist()
        n_shown = len(tokens) - (made.finish == "stop")  # the stop token has no text
        step = 1 if self._by_token else max(n_shown, 1)
        for i in range(0, n_shown, step):
            part = slice(i, min(i + step, n_shown))
            self._count(tokens[part], made.logp[part].tolist())
            piece = self._detokenizer.add(tokens[part])
            self._n_chars += len(piece)
            self.text += self._stop.add(piece)
            if self._stop.found:
                self.finish = "stop"
                break
        else:
            self._count(tokens[n_shown:], made.logp[n_shown:].tolist())
            if made.finish:
                self._end(made.finish)
        return Delta(self.text[n_text:], first)

    def _count(self, tokens: list[int], logp: list[float]) -> None:
        self.tokens += tokens
        self.logp += logp
        self.offsets += [self._n_chars] * len(tokens)

    def _end(self, finish: str) -> None:
        self.text += self._stop.add(self._detokenizer.end())
        if self._stop.found:
            finish = "stop"
        else:
            self.text += self._stop.end()
        self.finish = finish
