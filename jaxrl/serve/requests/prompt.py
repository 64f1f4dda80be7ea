"""A server's limits, and text to prompt tokens in a time that the context length bounds."""

import dataclasses
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from jaxrl.data.chat.encoding import ChatRenderer
from jaxrl.data.images.reader import ImageReader
from jaxrl.http.errors import RequestError
from jaxrl.serve.structured.grammar import GrammarCompiler
from jaxrl.tool_calls.formats import ToolFormat

MIN_VALUES = 1 << 17  # JSON values that any body may have
PREFIX_CHARS = 4  # characters per token of the context, of the first prefix that is tokenized
CUT_TOKENS = 64  # tokens that a prefix may have more than the whole text


@dataclasses.dataclass(frozen=True)
class ServerLimits:
    """Limits of the server."""

    model_name: str  # the served model name
    max_model_len: int  # tokens of prompt and response together
    vocab: int
    n_stop_ids: int  # stop token ids of a request, in addition to the model's own
    n_choices: int  # choices of one request
    longest_token: int  # bytes
    grammars: GrammarCompiler | None = None
    tool_format: ToolFormat | None = None  # in which the model writes tool calls
    images: ImageReader | None = None  # None: messages are text only
    adapters: tuple[str, ...] = ()  # model names of the adapters, in the engine's order

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names that a request may choose: the base model, then its adapters."""
        return (self.model_name, *self.adapters)

    @property
    def max_text_bytes(self) -> int:
        """Bytes of text that can fit the context."""
        return self.max_model_len * self.longest_token

    @property
    def max_values(self) -> int:
        """JSON values of a body: token ids of a prompt and more."""
        return MIN_VALUES + 2 * self.max_model_len


def longest_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Bytes of the longest token; an upper bound, because vocabularies write some bytes as two."""
    return max(len(token.encode(errors="replace")) for token in tokenizer.get_vocab())


def encode_text(
    text: str, renderer: ChatRenderer, limits: ServerLimits, *, special_tokens: bool
) -> np.ndarray:
    """Tokens of a text, int32 [prompt_len].

    Raises RequestError (400) if it does not fit the context. Prefixes of doubling length are
    tokenized first, so that the time is bounded by the context and not by the text.
    """
    check_size(len(text.encode()), limits)

    def tokens(text: str) -> list[int]:
        return renderer.tokenizer(text, add_special_tokens=special_tokens)["input_ids"]

    n_chars = PREFIX_CHARS * limits.max_model_len
    while n_chars < len(text):
        if len(tokens(text[:n_chars])) > limits.max_model_len + CUT_TOKENS:
            raise too_long(f"more than {limits.max_model_len}", limits.max_model_len)
        n_chars *= 2
    return np.array(tokens(text), np.int32)


def is_id(value: Any) -> bool:
    """Whether a JSON value is an integer; true is not."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_size(n_bytes: int, limits: ServerLimits) -> None:
    """Raises RequestError (400) for text with more bytes than the context can hold."""
    if n_bytes > limits.max_text_bytes:
        raise too_long(f"{n_bytes} bytes of text", limits.max_model_len)


def too_long(prompt: str, max_model_len: int, response: str = "") -> RequestError:
    """The error for a prompt, and perhaps a response, that exceed the context."""
    more = f" and {response}" if response else ""
    return RequestError(
        400,
        # clients such as litellm recognize these words, not the code
        f"This model's maximum context length is {max_model_len} tokens; the request has {prompt} "
        f"in the prompt{more}; shorten the prompt or lower max_tokens",
        code="context_length_exceeded",
    )
