"""JSON grammars: which tokens may follow, so that a response matches a JSON schema.

llguidance (https://github.com/guidance-ai/llguidance) follows the grammar on the host and gives one
bit per token; the engine's sampler applies them on the device.
"""

import dataclasses
import importlib.util
import json
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from jaxrl.data.support import n_words
from jaxrl.engine.api import GrammarError, TokenMatcher
from jaxrl.http.errors import RequestError

log = logging.getLogger(__name__)

MAX_SCHEMA_BYTES = 64 << 10
MAX_LEXER_STATES = 20_000  # of one response, about 2 kB each
NO_VALUE = "no value matches it"
# Up to 16 blanks between two parts of a value: a model could write blanks forever otherwise.
BLANKS = r"[ \n\r\t]{1,16}"


class GrammarCompiler:
    """Compiles JSON schemas for one tokenizer. Thread-safe."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, n_vocab: int, stop_ids: Sequence[int]):
        """Converts the tokenizer, about a second for 150,000 tokens. Any of `stop_ids` may end."""
        from llguidance import hf

        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise ValueError(f"{type(tokenizer).__name__} is no fast tokenizer")
        self._n_vocab = n_vocab
        self._tokenizer = hf.from_tokenizer(tokenizer, n_vocab=n_vocab, eos_token=list(stop_ids))

    def compile(self, schema: dict[str, Any], *, param: str) -> "JsonGrammar":
        """The grammar of a JSON schema.

        Raises RequestError (400), with the field `param`, if the schema is too large, invalid, or
        has keywords that the grammar cannot express.
        """
        from llguidance import LLMatcher, LLParserLimits

        text = json.dumps(schema)
        if len(text) > MAX_SCHEMA_BYTES:
            raise _invalid(f"has {len(text)} bytes, at most {MAX_SCHEMA_BYTES} are accepted", param)
        try:
            grammar = LLMatcher.grammar_from_json_schema(
                text, overrides={"whitespace_pattern": BLANKS, "lenient": False}
            )
            limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
            matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
            compiled = JsonGrammar(matcher, self._n_vocab)
            compiled.matcher().allowed()
            if matcher.is_accepting():
                raise GrammarError(NO_VALUE)
        except ValueError as error:
            raise _invalid(f"is not supported: {error}", param) from error
        return compiled


def grammar_compiler(
    tokenizer: PreTrainedTokenizerBase, n_vocab: int, stop_ids: Sequence[int]
) -> GrammarCompiler | None:
    """The compiler; None without the extra, or for a model without a way to end a response.

    A tokenizer that llguidance cannot read is logged.
    """
    if importlib.util.find_spec("llguidance") is None or not stop_ids:
        return None
    try:
        return GrammarCompiler(tokenizer, n_vocab, stop_ids)
    except Exception as error:  # of the library, for a tokenizer without a fast implementation
        log.warning("no JSON schemas and demanded tool calls with this tokenizer: %s", error)
        return None


def missing_compiler(param: str) -> RequestError:
    return RequestError(
        400,
        f"{param} needs the package llguidance (pip install 'jaxrl[grammar]'), and a model with a "
        "fast tokenizer and an end-of-sequence token; this server lacks one of them",
        param=param,
    )


@dataclasses.dataclass(frozen=True)
class JsonGrammar:
    """A compiled grammar, which the choices of a request share."""

    start: Any  # llguidance.LLMatcher, of an extra
    n_vocab: int

    def matcher(self) -> TokenMatcher:
        return JsonMatcher(self.start.deep_copy(), self.n_vocab)


class JsonMatcher:
    """Follows one response."""

    def __init__(self, matcher: Any, n_vocab: int):
        self._matcher, self._n_words = matcher, n_words(n_vocab)

    def allowed(self) -> np.ndarray:
        from llguidance.numpy import fill_next_token_bitmask

        mask = np.zeros((1, self._n_words), np.int32)
        self._check()
        fill_next_token_bitmask(self._matcher, mask)
        self._check()
        if not mask.any():
            raise GrammarError("no token of the model's vocabulary can follow")
        return mask[0].view(np.uint32)

    def accept(self, tokens: Sequence[int]) -> None:
        self._matcher.consume_tokens(list(tokens))
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            error = self._matcher.get_error().partition("\n")[0]
            raise GrammarError(NO_VALUE if "NoExtension" in error else error)


def _invalid(reason: str, param: str) -> RequestError:
    return RequestError(400, f"the JSON schema of {param} {reason}", param=param)
