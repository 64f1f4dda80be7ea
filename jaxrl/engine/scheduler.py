"""Host-side continuous batching: waiting and running queues, and page allocation."""

import bisect
import collections
import dataclasses

import numpy as np

from jaxrl.engine.api import Prefix, Request
from jaxrl.engine.pages import OutOfPages, PagePool


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
    pages: list[int]  # of the sequence from position 0
    adapter: int = 0  # of the sequence; 0 = the base model


PageCopy = tuple[int, int]  # from page, to page
UNLIMITED = 1 << 40  # rows


@dataclasses.dataclass
class DeviceWork:
    """Work for the device, executed in the order of the fields."""

    copies: list[PageCopy] = dataclasses.field(default_factory=list)
    prefill: list[PrefillChunk] = dataclasses.field(default_factory=list)
    # Copies of pages that `prefill` writes.
    post_prefill_copies: list[PageCopy] = dataclasses.field(default_factory=list)
    decode: list[Sequence] = dataclasses.field(default_factory=list)
    n_steps: int = 0
    previously_running: list[Sequence] = dataclasses.field(default_factory=list)
    row_budget: int = UNLIMITED  # prefill rows that may still be added
    prefilled_pages: set[int] = dataclasses.field(default_factory=set)  # written by `prefill`

    @property
    def full(self) -> bool:
        """Whether prefill uses the whole token budget of a dispatch.

        Then `previously_running` makes one decode step in the same dispatch, and no others follow.
        """
        return self.row_budget == 0


class Scheduler:
    """Plans one dispatch at a time: FCFS, preemption by recompute, chunked prefill.

    Requests start in the order of submission, as soon as a slot and the pages for their prompt and
    the next steps are free. If running sequences need more pages than are free, the newest of them
    is preempted: it returns to the queue and later recomputes its KV, except the pages that were
    not evicted in the meantime. The oldest is never preempted and fits the pool by itself, so at
    least one sequence always makes progress.

    While sequences run, a plan prefills at most `rows_per_dispatch` rows of `row_len` tokens. A
    longer prompt is prefilled in chunks: the pages of a chunk stay unreferenced in the prefix tree,
    the sequence keeps waiting, and the next plan finds them in the prefix cache.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        max_num_seqs: int,
        steps_per_dispatch: int,
        max_len: int,
        row_len: int,
        rows_per_dispatch: int,
    ):
        """`row_len` is a multiple of the page length."""
        self.pool = pool
        self.max_num_seqs, self.max_len = max_num_seqs, max_len
        self.steps_per_dispatch = steps_per_dispatch
        self.row_len, self.rows_per_dispatch = row_len, rows_per_dispatch
        self.waiting: collections.deque[Sequence] = collections.deque()
        self.running: list[Sequence] = []  # both in order of submission
        self.version = 0  # policy version
        self.n_preempted = 0
        self.n_cached_tokens = 0
        self._next_slot = 0
        # Copy a page for at least this many tokens; computing fewer is faster than a copy.
        self._min_copied_tokens = max(pool.page_len // 4, 1)

    @property
    def n_unfinished(self) -> int:
        return len(self.waiting) + len(self.running)

    def submit(self, request: Request) -> int:
        """Queues a request. Raises ValueError if it could never run."""
        seq = self._new_sequence(request)
        self.waiting.append(seq)
        return seq.slot

    def set_version(self, version: int) -> None:
        """Sets the policy version. If it changes, sequences that start later share no older KV."""
        if version != self.version:
            self.version = version
            self.pool.reset_prefix_cache()
            for seq in self.running:
                seq.mixed_versions = True

    def prefill(self, tokens: np.ndarray, adapter: int = 0) -> tuple[Prefix, DeviceWork]:
        """Allocates the pages of a prompt and plans its prefill with an adapter.

        Raises OutOfPages, or ValueError if the prompt leaves no room for a response.
        """
        tokens = np.asarray(tokens, np.int32)
        if not 0 < len(tokens) < self.max_len:
            raise ValueError(
                f"a prompt of {len(tokens)} tokens leaves no room for a response in the engine's "
                f"{self.max_len} tokens; raise config.data.max_prompt_len or shorten the prompt"
            )
        plan, cached = DeviceWork(), tokens[:-1]
        pages, n_found = self._allocate(cached, adapter, n_tokens=len(cached), plan=plan)
        self.n_cached_tokens += n_found
        self._prefill(cached, n_found, pages, plan, adapter)
        return Prefix(tokens, tuple(pages), self.version, adapter=adapter), plan

    def insert(self, prefix: Prefix, request: Request) -> tuple[int, DeviceWork]:
        """Starts a sequence from `prefix`. Returns its slot and a plan with the page copy it needs.

        Raises OutOfPages, or ValueError if all slots are taken, the prompts differ, or the policy
        version has changed.
        """
        same = np.array_equal(prefix.tokens, request.tokens)
        if not same or prefix.adapter != request.adapter:
            raise ValueError(
                "the request's tokens or adapter differ from those of the prefix; prefill them "
                "first"
            )
        if prefix.version != self.version:
            raise ValueError(
                f"the prefix was computed with policy version {prefix.version}, the engine has "
                f"version {self.version}; prefill it again"
            )
        if len(self.running) >= self.max_num_seqs:
            raise ValueError(
                f"all {self.max_num_seqs} slots are taken; free one or raise "
                "config.rollout.max_num_seqs"
            )
        seq = self._new_sequence(request)
        n_full, rest = divmod(len(prefix.tokens) - 1, self.pool.page_len)
        tail = self.pool.allocate(1 if rest else 0)
        seq.pages = self.pool.share(prefix.pages[:n_full]) + tail
        self.running.append(seq)
        return seq.slot, DeviceWork(copies=[(prefix.pages[n_full], tail[0])] if rest else [])

    def plan(self, *, limit_prefill: bool = False) -> DeviceWork:
        """Allocates pages for the next steps of running sequences, then starts waiting ones.

        With `limit_prefill`, prefill is limited to the token budget of one dispatch. Raises
        OutOfPages if prefixes of `prefill` hold so many pages that nothing can run.
        """
        n_steps = self._reserve()
        running = sorted(self.running, key=lambda seq: seq.slot)
        plan = DeviceWork(n_steps=n_steps, previously_running=running)
        if limit_prefill and self.pool.keep:
            plan.row_budget = self.rows_per_dispatch
        # If pages are so scarce that steps were reduced, a new sequence would soon be preempted.
        if plan.n_steps == self.steps_per_dispatch or not self.running:
            while self.waiting and len(self.running) < self.max_num_seqs and not plan.full:
                if not self._start(self.waiting[0], plan):
                    break
        if self.waiting and not self.running and not plan.full:
            self._start_with_one_step(plan)
        self.running.sort(key=lambda seq: seq.slot)
        plan.decode = list(self.running)
        return plan

    def _start_with_one_step(self, plan: DeviceWork) -> None:
        """Starts the first waiting sequence for one step.

        Used when idle and too few pages are free for a full dispatch.
        """
        plan.n_steps = 1
        if not self._start(self.waiting[0], plan):
            raise OutOfPages(
                f"prefixes hold {self.pool.n_used} of {self.pool.n_pages} pages, and the next "
                "request does not fit in the others; release some or raise config.rollout.n_pages"
            )

    def advance(self, seq: Sequence, tokens: list[int], finish: str) -> None:
        """Appends the tokens that a dispatch sampled for a running sequence."""
        seq.append(tokens)
        if finish:
            self._end(seq)

    def free(self, slot: int) -> None:
        """Cancels a waiting or running sequence. Raises KeyError if the slot has none."""
        for seq in self.running:
            if seq.slot == slot:
                return self._end(seq)
        for seq in self.waiting:
            if seq.slot == slot:
                return self.waiting.remove(seq)
        raise KeyError(f"slot {slot} is neither waiting nor running")

    def release_prefix(self, prefix: Prefix) -> None:
        self.pool.release(prefix.pages)

    def _new_sequence(self, request: Request) -> Sequence:
        self.check(request)
        self._next_slot += 1
        return Sequence(self._next_slot - 1, request)

    def check(self, request: Request) -> None:
        """Raises ValueError if the request could never run."""
        n = len(request.tokens)
        if n == 0 or request.max_tokens < 1:
            raise ValueError(
                "a request needs a prompt token and max_tokens of 1 or more, got "
                f"{n} and {request.max_tokens}"
            )
        if n + request.max_tokens > self.max_len:
            raise ValueError(
                f"a prompt of {n} tokens and max_tokens {request.max_tokens} exceed the engine's "
                f"{self.max_len} tokens; raise config.data.max_prompt_len or "
                "config.data.max_response_len"
            )
        need = self.pool.pages_for(n - 1 + request.max_tokens)
        if need > self.pool.n_pages:
            raise ValueError(
                f"a prompt of {n} tokens and max_tokens {request.max_tokens} need {need} KV pages, "
                f"the pool has {self.pool.n_pages}; raise config.rollout.n_pages or "
                "config.rollout.memory_utilization"
            )

    def _reserve(self) -> int:
        """Allocates pages to the running sequences for as many steps as fit. Returns the steps.

        Halves the steps down to one before it preempts the newest sequence.
        """
        n_steps = self.steps_per_dispatch
        while (need := self._missing_pages(n_steps)) > self.pool.n_free:
            if n_steps > 1:
                n_steps //= 2
            else:
                self._preempt(self.running[-1], n_missing=need)
                n_steps = self.steps_per_dispatch
        for seq in self.running:
            n = self.pool.pages_for(seq.n_cached_after(n_steps)) - len(seq.pages)
            seq.pages += self.pool.allocate(max(n, 0))
        return n_steps

    def _missing_pages(self, n_steps: int) -> int:
        pages_for = self.pool.pages_for
        return sum(
            max(pages_for(seq.n_cached_after(n_steps)) - len(seq.pages), 0) for seq in self.running
        )

    def _preempt(self, seq: Sequence, n_missing: int) -> None:
        if len(self.running) == 1:
            raise OutOfPages(
                f"the only running sequence needs {n_missing} more pages, and prefixes hold the "
                "others; release some or raise config.rollout.n_pages"
            )
        self._end(seq)
        self.waiting.insert(bisect.bisect(self.waiting, seq.slot, key=lambda s: s.slot), seq)
        self.n_preempted += 1

    def _start(self, seq: Sequence, plan: DeviceWork) -> bool:
        """Starts the first waiting sequence, or prefills a chunk of it if the budget is too small.

        Returns False if its pages are not free.
        """
        tokens, n_tokens = seq.cached_tokens(), seq.n_cached_after(plan.n_steps)
        try:
            pages, n_found = self._allocate(
                tokens, seq.request.adapter, n_tokens=n_tokens, plan=plan
            )
        except OutOfPages:
            return False
        if len(tokens) - n_found > plan.row_budget * self.row_len:
            self._prefill_chunk(seq, n_found, pages, plan)
            return True
        self.n_cached_tokens += max(n_found - seq.n_chunk_tokens, 0)
        self._prefill(tokens, n_found, pages, plan, seq.request.adapter)
        seq.pages, seq.mixed_versions, seq.n_chunk_tokens = pages, False, 0
        self.running.append(self.waiting.popleft())
        return True

    def _prefill_chunk(
        self, seq: Sequence, n_found: int, pages: list[int], plan: DeviceWork
    ) -> None:
        """Prefills as many tokens as the budget allows, in full pages, which stay in the tree."""
        n = (n_found + plan.row_budget * self.row_len) // self.pool.page_len  # more than found
        self.pool.release(pages[n:])
        chunk = seq.cached_tokens()[: n * self.pool.page_len]
        self._prefill(chunk, n_found, pages[:n], plan, seq.request.adapter)
        self.pool.release(pages[:n])
        seq.n_chunk_tokens += len(chunk) - n_found

    def _allocate(
        self, tokens: np.ndarray, adapter: int, *, n_tokens: int, plan: DeviceWork
    ) -> tuple[list[int], int]:
        """Pages for `n_tokens` tokens that start with `tokens`, and how many are already cached.

        Full pages in the prefix cache are shared, a partly matching page is copied. Raises
        OutOfPages and changes nothing if too few pages are free.
        """
        pool = self.pool
        found = pool.match_prefix(tokens, adapter)
        pages = pool.share(found.pages)
        try:
            n_new = max(pool.pages_for(n_tokens), pool.pages_for(len(tokens))) - len(pages)
            pages += pool.allocate(n_new)
        except OutOfPages:
            pool.release(pages)
            raise
        n_cached = len(found.pages) * pool.page_len
        # Copies run before prefill, which writes after the copied tokens, and before a copied page
        # that `allocate` evicted is reused. A page that this plan's prefill still has to write is
        # copied after it, and only if nothing is left to compute.
        unwritten = found.partial in plan.prefilled_pages
        complete = n_cached + found.n_partial == len(tokens)
        if complete or (not unwritten and found.n_partial >= self._min_copied_tokens):
            if found.n_partial:
                copies = plan.post_prefill_copies if unwritten else plan.copies
                copies.append((found.partial, pages[len(found.pages)]))
            n_cached += found.n_partial
        return pages, n_cached

    def _prefill(
        self, tokens: np.ndarray, start: int, pages: list[int], plan: DeviceWork, adapter: int
    ) -> None:
        """Adds the prefill of the tokens from `start` on to the plan."""
        if start < len(tokens):
            plan.prefill.append(PrefillChunk(tokens[start:], start, pages, adapter))
            plan.row_budget -= -(-(len(tokens) - start) // self.row_len)
            plan.prefilled_pages.update(
                pages[start // self.pool.page_len : self.pool.pages_for(len(tokens))]
            )
            self.pool.add_prefix(tokens, pages, adapter)

    def _end(self, seq: Sequence) -> None:
        """Releases the pages of a sequence, after adding them to the prefix cache if enabled."""
        self.running.remove(seq)
        if self.pool.keep and not seq.mixed_versions:
            adapter = seq.request.adapter
            seq.pages = self.pool.add_prefix(seq.cached_tokens(), seq.pages, adapter)
        self.pool.release(seq.pages)
        seq.pages = []
