"""Host-side continuous batching: waiting and running queues, and page allocation."""

import bisect
import collections
import dataclasses

import numpy as np

from jaxrl.engine.api import Prefix, Request
from jaxrl.engine.pages import ITEM, OutOfPages, PagePool, PrefixMatch, root
from jaxrl.engine.states import ZERO, StateSlots


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
    pages: list[int]  # of the sequence from position 0
    adapter: int = 0  # of the sequence; 0 = the base model
    source: int = ZERO  # slot of the state before the tokens
    target: int = ZERO  # slot of the state after them
    write_from: int = 0  # first position without KV; tokens before it only change the state


@dataclasses.dataclass(frozen=True)
class CachedPrefix:
    """Pages of a sequence, and how many of its first tokens need no computation."""

    pages: list[int]
    n_found: int  # tokens whose KV is in the prefix tree
    n_cached: int  # tokens whose KV is in the pages
    start: int  # tokens to skip in prefill; fewer than `n_cached` if a state is missing
    source: int = ZERO  # slot of the state after `start` tokens


PageCopy = tuple[int, int]  # from page, to page
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

    Sequences of models with a state also need a slot of it. Prefill leaves a snapshot of the state
    after the prompt, which its other samples start from, and after a prefix whose pages were found
    without one; a sequence that ends or is preempted leaves its last state.
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
        states: StateSlots | None = None,
    ):
        """`row_len` is a multiple of the page length; `states` are those of a model with states.

        The pool forgets the snapshots of pages that it evicts.
        """
        self.pool, self.states = pool, states
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
            if self.states is not None:
                self.states.reset()
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
        found = self._allocate(cached, adapter, n_tokens=len(cached), plan=plan)
        state = self._allocate_state(found.pages, plan)
        self.n_cached_tokens += found.start
        self._prefill(cached, found, plan, adapter, state)
        return Prefix(tokens, tuple(found.pages), self.version, adapter=adapter, state=state), plan

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
        plan = DeviceWork()
        tail = self.pool.allocate(1 if rest else 0)
        if rest:
            plan.copies.append((prefix.pages[n_full], tail[0]))
        seq.pages = self.pool.share(prefix.pages[:n_full]) + tail
        if self.states is not None:
            seq.state = self._allocate_state(tail, plan)
            plan.state_copies.append((prefix.state, seq.state))
        self.running.append(seq)
        return seq.slot, plan

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
        if self.states is not None:
            self.states.free(prefix.state)

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
        adapter = seq.request.adapter
        try:
            found = self._allocate(tokens, adapter, n_tokens=n_tokens, plan=plan)
            state = self._allocate_state(found.pages, plan)
        except OutOfPages:
            return False
        if len(tokens) - found.start > plan.row_budget * self.row_len:
            self._prefill_chunk(seq, found, state, plan)
            return True
        self.n_cached_tokens += max(found.start - seq.n_chunk_tokens, 0)
        self._prefill(tokens, found, plan, adapter, state)
        seq.pages, seq.state = found.pages, state
        seq.mixed_versions, seq.n_chunk_tokens = False, 0
        self.running.append(self.waiting.popleft())
        return True

    def _prefill_chunk(
        self, seq: Sequence, found: CachedPrefix, state: int, plan: DeviceWork
    ) -> None:
        """Prefills as many tokens as the budget allows, in full pages, which stay in the tree.

        The state after them, in `state`, becomes a snapshot.
        """
        # More than found.
        n = (found.start + plan.row_budget * self.row_len) // self.pool.page_len
        self.pool.release(found.pages[n:])
        chunk, adapter = seq.cached_tokens()[: n * self.pool.page_len], seq.request.adapter
        found = dataclasses.replace(found, pages=found.pages[:n])
        self._prefill(chunk, found, plan, adapter, state, keep_state=False)
        if self.states is not None:
            self._keep_state(state, chunk, found.pages, adapter, plan)
        self.pool.release(found.pages)
        seq.n_chunk_tokens += len(chunk) - found.start

    def _allocate(
        self, tokens: np.ndarray, adapter: int, *, n_tokens: int, plan: DeviceWork
    ) -> CachedPrefix:
        """Pages for `n_tokens` tokens that start with `tokens`, some of which are already cached.

        Full pages in the prefix cache are shared, a partly matching page is copied. Raises
        OutOfPages and changes nothing if too few pages are free.
        """
        pool = self.pool
        found = pool.match_prefix(tokens, adapter)
        start, source = len(tokens), ZERO
        if self.states is not None:
            start, source = self._find_state(self.states, tokens, found, adapter, plan)
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
        finished = complete and start == len(tokens)
        needed = self.states is not None and start > n_cached
        worth = complete or needed or found.n_partial >= self._min_copied_tokens
        if found.n_partial and (finished or (worth and not unwritten)):
            copies = plan.post_prefill_copies if unwritten else plan.copies
            copies.append((found.partial, pages[len(found.pages)]))
            n_cached += found.n_partial
        n_found = len(found.pages) * pool.page_len + found.n_partial
        return CachedPrefix(pages, n_found, n_cached, min(start, n_cached), source)

    def _find_state(
        self,
        states: StateSlots,
        tokens: np.ndarray,
        found: PrefixMatch,
        adapter: int,
        plan: DeviceWork,
    ) -> tuple[int, int]:
        """(n, slot) of the longest snapshot: the state after n tokens, whose KV is in `found`.

        Snapshots and pages that this plan's prefill writes count only if nothing is left to
        compute.
        """
        page_len, whole = self.pool.page_len, tokens.tobytes()
        unwritten = found.partial in plan.prefilled_pages
        n_found = len(found.pages) * page_len + found.n_partial
        for i in range(len(found.pages), -1, -1):
            parent = found.pages[i - 1] if i else root(adapter)
            last = i == len(found.pages)
            n = found.n_partial if last else page_len
            after = whole[i * page_len * ITEM :][: n * ITEM]
            match = states.longest(parent, after, ())
            finished = last and n_found == len(tokens) and match and match[0] == after
            if not finished:
                after = b"" if last and unwritten else after
                match = states.longest(parent, after, plan.prefilled_states)
            if match is not None:
                known, slot = match
                plan.pinned_states.add(slot)
                states.use(slot)
                return i * page_len + len(known) // ITEM, slot
        return 0, ZERO

    def _allocate_state(self, pages: list[int], plan: DeviceWork) -> int:
        """A slot of state for a sequence with these pages, which are released if there is none."""
        if self.states is None:
            return ZERO
        try:
            return self.states.allocate(plan.pinned_states)
        except OutOfPages:
            self.pool.release(pages)
            raise

    def _prefill(
        self,
        tokens: np.ndarray,
        found: CachedPrefix,
        plan: DeviceWork,
        adapter: int,
        state: int,
        *,
        keep_state: bool = True,
    ) -> None:
        """Adds the prefill of the tokens that are not found to the plan, with the state in `state`.

        With `keep_state` it leaves a snapshot after the tokens.
        """
        page_len = self.pool.page_len
        if found.n_found < len(tokens):
            plan.prefilled_pages.update(
                found.pages[found.n_cached // page_len : self.pool.pages_for(len(tokens))]
            )
            self.pool.add_prefix(tokens, found.pages, adapter)
        source, start = found.source, found.start
        if self.states is None:
            return self._add_rows(tokens, start, found, plan, adapter)
        border = found.n_cached // page_len * page_len
        if start < border < len(tokens) and (snapshot := self._snapshot_slot(plan)):
            # Another prefix has the pages until here: more may follow.
            self._add_rows(tokens[:border], start, found, plan, adapter, source, snapshot)
            self._keep_state(snapshot, tokens[:border], found.pages, adapter, plan)
            source, start = snapshot, border
        if start < len(tokens):
            snapshot = self._snapshot_slot(plan) if keep_state else 0
            self._add_rows(tokens, start, found, plan, adapter, source, snapshot or state)
            if snapshot:
                self._keep_state(snapshot, tokens, found.pages, adapter, plan)
            source = snapshot or state
        if source != state:
            late = source in plan.prefilled_states
            copies = plan.post_prefill_state_copies if late else plan.state_copies
            copies.append((source, state))

    def _add_rows(
        self,
        tokens: np.ndarray,
        start: int,
        found: CachedPrefix,
        plan: DeviceWork,
        adapter: int,
        source: int = ZERO,
        target: int = ZERO,
    ) -> None:
        """Adds the tokens from `start` on to the plan's prefill."""
        if start < len(tokens):
            chunk = PrefillChunk(
                tokens[start:], start, found.pages, adapter, source, target, found.n_cached
            )
            plan.prefill.append(chunk)
            plan.row_budget -= -(-(len(tokens) - start) // self.row_len)

    def _snapshot_slot(self, plan: DeviceWork) -> int:
        """A slot for a snapshot, or 0 if this plan uses all."""
        assert self.states is not None
        try:
            return self.states.allocate(plan.pinned_states)
        except OutOfPages:
            return 0

    def _keep_state(
        self, slot: int, tokens: np.ndarray, pages: list[int], adapter: int, plan: DeviceWork | None
    ) -> None:
        """Makes the slot the snapshot of the state after these tokens, whose pages are cached.

        `plan` is the one whose prefill writes it, if there is one.
        """
        assert self.states is not None
        n_full = len(tokens) // self.pool.page_len
        parent = pages[n_full - 1] if n_full else root(adapter)
        if plan is not None:
            plan.prefilled_states.add(slot)
            plan.pinned_states.add(slot)
        self.states.keep(slot, parent, tokens[n_full * self.pool.page_len :].tobytes())

    def _end(self, seq: Sequence) -> None:
        """Releases the pages of a sequence, after adding them to the prefix cache if enabled."""
        self.running.remove(seq)
        tokens, adapter = seq.cached_tokens(), seq.request.adapter
        kept = self.pool.keep and not seq.mixed_versions
        if kept:
            seq.pages = self.pool.add_prefix(tokens, seq.pages, adapter)
        if self.states is not None and kept and len(tokens):
            self._keep_state(seq.state, tokens, seq.pages, adapter, plan=None)
        elif self.states is not None:
            self.states.free(seq.state)
        self.pool.release(seq.pages)
        seq.pages, seq.state = [], ZERO
