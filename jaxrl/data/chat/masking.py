"""Tokens and loss mask of rendered assistant turns.

A rollout tokenizes the prompt alone, and the model generates the tokens of its turn after it. Some
tokenizers merge the first characters of a turn with the end of the prompt if both are one text. So
the tokens before a turn are those of the prompt alone, and the turn follows them.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int32

from jaxrl.data.chat.encoding import ChatRenderer

_BEFORE = ("x", "\n", ".")  # text before a turn, to tokenize it as a continuation

CharSpan = tuple[int, int]  # first character, and the one after the last
MaskedTokens = tuple[Int32[np.ndarray, " n"], Bool[np.ndarray, " n"]]


@dataclasses.dataclass(frozen=True)
class TurnText:
    """An assistant turn with all text before it."""

    text: str  # up to the end-of-sequence token after the turn
    learned: tuple[CharSpan, ...]  # of the text
    end: int  # where the end-of-sequence token begins

    @property
    def start(self) -> int | None:
        """Where the learned text begins, if all text from there on is learned; else None."""
        starts = [*(start for start, _ in self.learned), len(self.text)]
        ends = [end for _, end in self.learned]
        return starts[0] if starts[1:] == ends else None


def tokenize_turns(
    renderer: ChatRenderer, turns: Sequence[TurnText], stop: Sequence[int]
) -> MaskedTokens:
    """(tokens, loss mask) of the turns of one conversation: each continues the text before it.

    Raises ValueError if the end of a turn is not tokenized as one of the `stop` tokens.
    """
    if any(turn.start is None for turn in turns):
        return _by_characters(renderer, turns, stop)
    befores = [0, *(turn.end for turn in turns)]  # a later prompt begins with the end token
    prompts = [turn.text[at : turn.start] for turn, at in zip(turns, befores, strict=False)]
    together, *separate = renderer.tokenize([turns[-1].text, *prompts])
    parts: list[tuple[np.ndarray, bool]] = []
    done = 0  # tokens of `together` whose turns are in `parts`
    for i, (turn, prompt) in enumerate(zip(turns, separate, strict=True)):
        prompt = prompt[1:] if i else prompt
        n_ends = int(np.isin(prompt, stop).sum())
        ends = np.flatnonzero(np.isin(together[done:], stop))
        if len(ends) <= n_ends:
            raise ValueError(_not_stopped(turn))
        after = done + int(ends[n_ends]) + 1
        own = together[done + len(prompt) : after]
        if not np.array_equal(together[done : done + len(prompt)], prompt):
            own = _continuation(renderer, turn.text[turn.start :])
        parts += [(prompt, False), (own, True)]
        done = after
    if done != len(together):
        raise ValueError(_not_stopped(turns[-1]))
    tokens = np.concatenate([part for part, _ in parts])
    return tokens, np.repeat([learned for _, learned in parts], [len(part) for part, _ in parts])


def _continuation(renderer: ChatRenderer, text: str) -> np.ndarray:
    """Tokens of text that continues other text: without the space that some tokenizers prepend."""
    alone, *before = renderer.tokenize([text, *_BEFORE])
    first = str(renderer.tokenizer.convert_ids_to_tokens(int(before[0][0])))
    if not first.startswith(("▁", "Ġ")):
        return alone
    after = renderer.tokenize([anchor + text for anchor in _BEFORE])
    for anchor, tokens in zip(before, after, strict=True):
        if np.array_equal(tokens[: len(anchor)], anchor):  # not merged with the text
            return tokens[len(anchor) :]
    return alone


def _by_characters(
    renderer: ChatRenderer, turns: Sequence[TurnText], stop: Sequence[int]
) -> MaskedTokens:
    """The tokens whose first characters are learned, for templates that mark parts of a turn."""
    text = turns[-1].text
    [(tokens, starts)] = renderer.special_tokens.encode([text], offsets=True)
    mask = np.zeros(len(tokens), bool)
    for start, end in (span for turn in turns for span in turn.learned):
        first, after = np.searchsorted(starts, [start, end])
        mask[first:after] = True
    if tokens[-1] not in stop:
        raise ValueError(_not_stopped(turns[-1]))
    return tokens, mask


def _not_stopped(turn: TurnText) -> str:
    return (
        f"{turn.text[-20:]!r} at the end of a turn is not tokenized as an end-of-sequence token; "
        "add it to the special tokens of the tokenizer, or set data.chat_template"
    )
