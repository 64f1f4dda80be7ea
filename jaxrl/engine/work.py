"""Sequences in the engine, and the device work that is planned for them."""

import dataclasses

import numpy as np

from jaxrl.engine.api import Request
from jaxrl.engine.states import ZERO


class Sequence:
    """A request with its tokens and pages.

    The KV of its last token is not cached yet: the next decode step feeds that token.
    """

    def __init__(self, slot: int, request: Request):
        self.slot, self.request = slot, request
        self.n_tokens = len(request.tokens)
        self._buffer = np.empty(self.n_tokens + request.max_tokens, np.int32)
        self._buffer[: self.n_tokens] = request.tokens
        self.pages: list[int] = []
        self.first: tuple[int, ...] = ()  # by window, index of the first page that it still sees
        self.tables: dict[int, list[int]] = {}  # `PagePool.tables`, as of the last plan
        self.state = ZERO  # slot of its state while it runs; of models without one, always this
        self.mixed_versions = False  # its KV was computed by more than one policy version
        self.n_chunk_tokens = 0  # tokens prefilled in chunks while it was waiting
        grammar = request.adjustments and request.adjustments.grammar
        self._matcher = grammar.matcher() if grammar else None
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
        return len(self._buffer) - self.n_tokens

    @property
    def remaining_in_dispatch(self) -> int:
        """A grammar's next tokens are known after each token only."""
        return self.remaining if self._matcher is None else min(self.remaining, 1)

    def follow_grammar(self, tokens: list[int]) -> None:
        """Finds the tokens that may follow these. Raises GrammarError."""
        if self._matcher is not None:
            self._matcher.accept(tokens)
            self.allowed = self._matcher.allowed()

    def append(self, tokens: list[int]) -> None:
        self._buffer[self.n_tokens : self.n_tokens + len(tokens)] = tokens
        self.n_tokens += len(tokens)

    def cached_tokens(self) -> np.ndarray:
        """The tokens whose KV must be in the cache before the next decode step."""
        return self.tokens[:-1]

    def n_cached_after(self, n_steps: int) -> int:
        """Tokens with KV in the cache after `n_steps` more decode steps."""
        return self.n_tokens - 1 + min(n_steps, self.remaining)


@dataclasses.dataclass(frozen=True)
class PrefillChunk:
    """Tokens to prefill at positions start, start + 1, ... of one sequence."""

    tokens: np.ndarray
    start: int
    # By window, the device pages of the sequence from position 0 (`PagePool.tables`); those of
    # shared pages as `read_only`.
    tables: dict[int, list[int]]
    adapter: int = 0  # of the sequence; 0 = the base model
    source: int = ZERO  # slot of the state before the tokens
    target: int = ZERO  # slot of the state after them


PageCopy = tuple[int, ...]  # from page, to page; the same of the device pages by window
StateCopy = tuple[int, int]  # from slot, to slot
UNLIMITED = 1 << 40  # rows


@dataclasses.dataclass
class DeviceWork:
    """Work for the device, executed in the order of the fields."""

    copies: list[PageCopy] = dataclasses.field(default_factory=list)
    state_copies: list[StateCopy] = dataclasses.field(default_factory=list)
    prefill: list[PrefillChunk] = dataclasses.field(default_factory=list)
    # Copies of pages and of states that `prefill` writes.
    post_prefill_copies: list[PageCopy] = dataclasses.field(default_factory=list)
    post_prefill_state_copies: list[StateCopy] = dataclasses.field(default_factory=list)
    decode: list[Sequence] = dataclasses.field(default_factory=list)
    n_steps: int = 0
    previously_running: list[Sequence] = dataclasses.field(default_factory=list)
    row_budget: int = UNLIMITED  # prefill rows that may still be added
    prefilled_pages: set[int] = dataclasses.field(default_factory=set)  # written by `prefill`
    prefilled_states: set[int] = dataclasses.field(default_factory=set)  # snapshots, by `prefill`
    pinned_states: set[int] = dataclasses.field(default_factory=set)  # snapshots in use

    @property
    def full(self) -> bool:
        """Whether prefill uses the whole token budget of a dispatch.

        Then `previously_running` makes one decode step in the same dispatch, and no others follow.
        """
        return self.row_budget == 0
