"""A sequence of the engine: a request with its tokens, pages and state."""

import numpy as np

from jaxrl.engine.api import GrammarError, Request
from jaxrl.engine.states import ZERO


class Sequence:
    """A request with its tokens and pages.

    The KV of its last token is not cached yet: the next decode step feeds that token.
    """

    def __init__(self, slot: int, request: Request):
        self.slot, self.request = slot, request
        self.n_tokens = len(request.tokens)
        self.max_tokens = self.n_tokens + request.max_tokens  # prompt included
        self._buffer = np.empty(self.max_tokens, np.int32)
        self._buffer[: self.n_tokens] = request.tokens
        self.pages: list[int] = []
        self.first: tuple[int, ...] = ()  # by window, index of the first page that it still sees
        # int32 [pages of max_len], `PagePool.tables` of the pages while it runs, then zeros
        self.tables: dict[int, np.ndarray] = {}
        self.running = False  # whether it has pages, and dispatches decode it
        self.state = ZERO  # slot of its state while it runs; of models without one, always this
        self.mixed_versions = False  # its KV was computed by more than one policy version
        self.n_chunk_tokens = 0  # tokens prefilled in chunks while it was waiting
        grammar = request.adjustments and request.adjustments.grammar
        self._matcher = grammar.matcher() if grammar else None
        self.stops_at_text = bool(request.sampling.stop)  # which the caller finds
        self.packed = b""  # the columns of its request in a decode batch, once it was in one
        # uint32 [W], the tokens that the grammar allows next; None without a grammar
        self.allowed = self._matcher.allowed() if self._matcher else None

    @property
    def tokens(self) -> np.ndarray:
        """int32, prompt and response so far."""
        return self._buffer[: self.n_tokens]

    @property
    def last_token(self) -> int:
        return int(self._buffer[self.n_tokens - 1])

    @property
    def remaining(self) -> int:
        return self.max_tokens - self.n_tokens

    @property
    def remaining_in_dispatch(self) -> int:
        """A grammar's next tokens are known after each token only."""
        return self.remaining if self._matcher is None else min(self.remaining, 1)

    def follow_grammar(self, tokens: list[int]) -> str:
        """Finds the tokens that may follow these; the message if the grammar fails."""
        if self._matcher is not None:
            try:
                self._matcher.accept(tokens)
                self.allowed = self._matcher.allowed()
            except GrammarError as failed:
                return str(failed) or type(failed).__name__
        return ""

    def append(self, tokens: np.ndarray | list[int]) -> None:
        start, self.n_tokens = self.n_tokens, self.n_tokens + len(tokens)
        self._buffer[start : self.n_tokens] = tokens

    def cached_tokens(self) -> np.ndarray:
        """The tokens whose KV must be in the cache before the next decode step."""
        return self.tokens[:-1]

    def n_cached_after(self, n_steps: int) -> int:
        """Tokens with KV in the cache after `n_steps` more decode steps."""
        return self.n_tokens - 1 + min(n_steps, self.remaining)
