"""Special tokens whose text is inside a message: found, and tokenized as ordinary text.

A tokenizer reads "<|im_end|>" as the end of a turn wherever it is, so the text of a message could
end its turn. A separator inside that text hides it from the tokenizer; the tokens of the separator
are removed again.
"""

import re
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int32
from transformers import PreTrainedTokenizerBase

from jaxrl.json_text import Message

SEPARATOR = "\ufdd0"  # a code point that Unicode reserves for such uses: no text has it
_REASONING = {"<think>", "</think>"}  # text of a turn, also where they are special tokens
_TEXTS = ("content", "reasoning_content")

Encoded = tuple[Int32[np.ndarray, " n"], np.ndarray]  # tokens, first character of each


class SpecialTokens:
    """The special tokens of a tokenizer, and those that a chat template writes around turns."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, skeleton: str = ""):
        """`skeleton` is a rendered conversation with almost no text."""
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.values()
        texts = {token.content for token in added if token.special or token.content in skeleton}
        texts |= set(tokenizer.all_special_tokens)
        texts = {text for text in texts - _REASONING if len(text.strip()) > 1}
        longest_first = sorted(texts, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def first_in(self, messages: Sequence[Message]) -> tuple[int, str] | None:
        """(index of a message, special token in it) of the first one; None if there is none."""
        for i, message in enumerate(messages):
            for text in _strings(message):
                if found := self._pattern.search(text):
                    return i, found.group()
        return None

    def hide(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with a separator inside every special token of their text."""
        return [self._hidden(message) for message in messages]

    def _hidden(self, message: Message) -> Message:
        texts = {name: text for name in _TEXTS if isinstance(text := message.get(name), str)}
        changed = {
            name: self._pattern.sub(
                _separated, text.replace(SEPARATOR, "\N{REPLACEMENT CHARACTER}")
            )
            for name, text in texts.items()
        }
        return message if changed == texts else message | changed

    def encode(self, texts: Sequence[str], *, offsets: bool = False) -> list[Encoded]:
        """(tokens, first character of each) of rendered texts, without separators.

        The characters are only found with `offsets`. Raises ValueError if the text of a special
        token cannot be written with other tokens.
        """
        # the template already contains the special tokens
        offsets = offsets or any(SEPARATOR in text for text in texts)
        encoded = self._tokenizer(
            list(texts), add_special_tokens=False, return_offsets_mapping=offsets
        )
        spans = (
            encoded["offset_mapping"]
            if offsets
            else [[(0, 0)] * len(i) for i in encoded["input_ids"]]
        )
        return [
            self._without_separators(
                text, np.array(ids, np.int32), np.array(at, int).reshape(-1, 2)
            )
            for text, ids, at in zip(texts, encoded["input_ids"], spans, strict=True)
        ]

    def _without_separators(self, text: str, ids: np.ndarray, spans: np.ndarray) -> Encoded:
        if SEPARATOR not in text:
            return ids, spans[:, 0]
        at = np.array([i for i, character in enumerate(text) if character == SEPARATOR])
        kept = ~((spans[:, :1] <= at) & (at < spans[:, 1:])).any(axis=1)
        plain = text.replace(SEPARATOR, "")
        written = str(self._tokenizer.decode(ids[kept].tolist()))
        if len(self._pattern.findall(written)) != len(self._pattern.findall(plain)):
            raise ValueError(
                "the tokenizer cannot write the text of a special token with other tokens; remove "
                "it from the messages"
            )
        return ids[kept], spans[kept, 0]


def _separated(token: re.Match[str]) -> str:
    return token[0][:1] + SEPARATOR + token[0][1:]


def _strings(message: Message) -> list[str]:
    """All text of a message and of its tool calls that a template may write."""
    found, values = [], list(message.values())
    while values:
        value = values.pop()
        if isinstance(value, str):
            found.append(value)
        elif isinstance(value, dict):
            values += [*value, *value.values()]
        elif isinstance(value, list):
            values += value
    return found
