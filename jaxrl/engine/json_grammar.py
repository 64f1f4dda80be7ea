"""JSON of a schema in the engine: the tokens that llguidance allows next, one bit per token."""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl.data.support import n_words
from jaxrl.engine.api import GrammarError, TokenMatcher
from jaxrl.engine.json_matcher import check

# CPU time of a response's grammar: the engine's thread computes what may follow, for all responses.
MATCHER_START_S, MATCHER_TOKEN_S = 0.2, 0.002  # at first, and per token


@dataclasses.dataclass(frozen=True)
class JsonGrammar:
    """The grammar of a JSON schema, which the choices of a request share."""

    schema: str  # JSON
    param: str  # the field of the request that has it
    n_vocab: int
    start: Any = None  # llguidance.LLMatcher, of an extra; None until GrammarCompiler builds it

    def matcher(self) -> TokenMatcher:
        return JsonMatcher(self.start.deep_copy(), self.n_vocab)


class JsonMatcher:
    """Follows one response, for a limited CPU time."""

    def __init__(self, matcher: Any, n_vocab: int):
        self._matcher, self._n_words = matcher, n_words(n_vocab)
        self._left_s = MATCHER_START_S

    def allowed(self) -> np.ndarray:
        from llguidance.numpy import fill_next_token_bitmask

        mask, start = np.zeros((1, self._n_words), np.int32), time.thread_time()
        self._check()
        fill_next_token_bitmask(self._matcher, mask)
        self._check()
        self._spend(time.thread_time() - start)
        if not mask.any():
            raise GrammarError("no token of the model's vocabulary can follow")
        return mask[0].view(np.uint32)

    def accept(self, tokens: Sequence[int]) -> None:
        start = time.thread_time()
        self._matcher.consume_tokens(list(tokens))
        self._check()
        self._spend(time.thread_time() - start - MATCHER_TOKEN_S * len(tokens))

    def _spend(self, seconds: float) -> None:
        """Counts CPU time beyond what the tokens have."""
        self._left_s = min(self._left_s - seconds, MATCHER_START_S)
        if self._left_s < 0:
            raise GrammarError(
                f"the schema takes more than {MATCHER_TOKEN_S * 1e3:g} ms per token; use fewer and "
                "simpler patterns"
            )

    def _check(self) -> None:
        try:
            check(self._matcher)
        except ValueError as error:
            raise GrammarError(str(error)) from error
