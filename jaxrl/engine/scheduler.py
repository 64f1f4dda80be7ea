"""Host-side continuous batching: sequences in queues, and the plan of each dispatch."""

import bisect
import collections
import dataclasses
import itertools
import operator

import numpy as np

from jaxrl.engine.api import Prefix, Request
from jaxrl.engine.images import ImageTable
from jaxrl.engine.pages import OutOfPages, PagePool
from jaxrl.engine.prefill import CachedPrefix, PrefillPlanner, PrefillWork, page_copy
from jaxrl.engine.sequence import Sequence
from jaxrl.engine.states import ZERO, StateSlots

_by_slot = operator.attrgetter("slot")


@dataclasses.dataclass
class DispatchPlan:
    """The work of one dispatch of a replica: prefill, then decode steps."""

    n_steps: int  # decode steps
    previously_running: list[Sequence] = dataclasses.field(default_factory=list)
    prefill: PrefillWork = dataclasses.field(default_factory=PrefillWork)
    decode: list[Sequence] = dataclasses.field(default_factory=list)

    @property
    def full(self) -> bool:
        """Whether prefill uses the whole token budget of a dispatch.

        Then `previously_running` makes one decode step in the same dispatch, and no others follow.
        """
        return self.prefill.row_budget == 0


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
        images: ImageTable | None = None,
    ):
        """`row_len` is a multiple of the page length; `states` are those of a model with states.

        `images` has those of the requests.

        The pool forgets the snapshots of pages that it evicts.
        """
        self.pool, self.states = pool, states
        self.max_num_seqs, self.max_len = max_num_seqs, max_len
        self.steps_per_dispatch = steps_per_dispatch
        self.row_len, self.rows_per_dispatch = row_len, rows_per_dispatch
        self.waiting: collections.deque[Sequence] = collections.deque()
        self.running: list[Sequence] = []  # both in order of submission
        self.version = 0  # policy version
        # Whether decode steps were dispatched with a plan that continues the last one (`extend`).
        self.ahead = False
        self._stale = True  # whether a new plan may have other sequences than the last one
        self.n_preempted = 0
        self.n_cached_tokens = 0
        self._next_slot = 0
        self._prefill = PrefillPlanner(pool, states, row_len, images)
        self._whole_images = images is not None and images.settings.whole  # prompts are not divided

    @property
    def n_unfinished(self) -> int:
        return len(self.waiting) + len(self.running)

    def submit(self, request: Request) -> int:
        """Queues a request. Raises ValueError if it could never run."""
        seq = self._new_sequence(request)
        self.waiting.append(seq)
        self._stale = True
        return seq.slot

    def set_version(self, version: int) -> None:
        """Sets the policy version. If it changes, sequences that start later share no older KV."""
        if version != self.version:
            self.version = version
            self.pool.reset_prefix_cache()
            if self._prefill.images is not None:
                self._prefill.images.forget()
            if self.states is not None:
                self.states.reset()
            for seq in self.running:
                seq.mixed_versions = True

    def prefill(self, tokens: np.ndarray, adapter: int = 0) -> tuple[Prefix, PrefillWork]:
        """Allocates the pages of a prompt and plans its prefill with an adapter.

        Raises OutOfPages, or ValueError if the prompt leaves no room for a response.
        """
        tokens = np.asarray(tokens, np.int32)
        if not 0 < len(tokens) < self.max_len:
            raise ValueError(
                f"a prompt of {len(tokens)} tokens leaves no room for a response in the engine's "
                f"{self.max_len} tokens; raise config.data.max_prompt_len or shorten the prompt"
            )
        work, cached = PrefillWork(), tokens[:-1]
        found = self._prefill.allocate(cached, adapter, n_tokens=len(cached), work=work)
        self.n_cached_tokens += found.start
        self._prefill.prefill(cached, found, work, adapter)
        first = self.pool.slide(found.pages, found.first, len(cached))
        prefix = Prefix(
            tokens,
            tuple(found.pages),
            self.version,
            adapter=adapter,
            state=found.state,
            first=first,
        )
        return prefix, work

    def insert(self, prefix: Prefix, request: Request) -> tuple[int, PrefillWork]:
        """Starts a sequence from `prefix`. Returns its slot and the work of the copies it needs.

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
        work = PrefillWork()
        tail = self.pool.allocate(1 if rest else 0)
        if rest:
            pages = prefix.pages[n_full], tail[0]
            work.copies.append(page_copy(*map(self.pool.device_pages, pages)))
        seq.pages = self.pool.share(prefix.pages[:n_full], prefix.first) + tail
        seq.first = prefix.first
        if self.states is not None:
            seq.state = self._prefill.allocate_state(seq.pages, work)
            work.state_copies.append((prefix.state, seq.state))
        self._write_tables(seq)
        seq.running = self._stale = True
        self.running.append(seq)
        return seq.slot, work

    def plan(self, *, limit_prefill: bool = False) -> DispatchPlan:
        """Allocates pages for the next steps of running sequences, then starts waiting ones.

        With `limit_prefill`, prefill is limited to the token budget of one dispatch. Raises
        OutOfPages if prefixes of `prefill` hold so many pages that nothing can run.
        """
        self.ahead = False
        n_steps = self._reserve()
        plan = DispatchPlan(n_steps, previously_running=sorted(self.running, key=_by_slot))
        if limit_prefill and self.pool.keep and not self._whole_images:
            plan.prefill.row_budget = self.rows_per_dispatch
        # If pages are so scarce that steps were reduced, a new sequence would soon be preempted.
        if plan.n_steps == self.steps_per_dispatch or not self.running:
            while self.waiting and len(self.running) < self.max_num_seqs and not plan.full:
                if not self._start(self.waiting[0], plan):
                    break
        if self.waiting and not self.running and not plan.full:
            self._start_with_one_step(plan)
        self.running.sort(key=_by_slot)
        plan.decode = list(self.running)
        self._stale = plan.full
        return plan

    def extension(self, n_steps: int) -> list[int] | None:
        """Pages that running sequences need for `n_steps` steps without another plan.

        These are counted from the tokens that they have, so that they include the steps of
        dispatches that were not read yet. None if a plan may have more to do for waiting sequences,
        or too few pages are free.
        """
        if self._stale or sum(missing := self._missing_pages(n_steps)) > self.pool.n_free:
            return None
        return missing

    def extend(self, n_pages: list[int]) -> None:
        """Allocates the pages of an `extension`."""
        self._allocate(n_pages)
        self.ahead = True

    def _start_with_one_step(self, plan: DispatchPlan) -> None:
        """Starts the first waiting sequence for one step.

        Used when idle and too few pages are free for a full dispatch.
        """
        plan.n_steps = 1
        if not self._start(self.waiting[0], plan):
            raise OutOfPages(
                f"prefixes hold {self.pool.n_used} of {self.pool.n_pages} pages, and the next "
                "request does not fit in the others; release some or raise config.rollout.n_pages"
            )

    def advance(self, seq: Sequence, tokens: np.ndarray | list[int], finish: str) -> None:
        """Appends the tokens that a dispatch sampled for a running sequence."""
        seq.append(tokens)
        if finish:
            self._end(seq)

    def free(self, slot: int) -> None:
        """Cancels a waiting or running sequence. Raises KeyError if the slot has none."""
        for seq in self.running:
            if seq.slot == slot:
                self._stale = True  # the device does not know: its row must leave the batch
                return self._end(seq, keep_state=not self.ahead)
        for seq in self.waiting:
            if seq.slot == slot:
                return self.waiting.remove(seq)
        raise KeyError(f"slot {slot} is neither waiting nor running")

    def release_prefix(self, prefix: Prefix) -> None:
        self.pool.release(prefix.pages, prefix.first)
        if self.states is not None:
            self.states.free(prefix.state)
        self._stale |= bool(self.waiting)

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

        Pages that no window reaches any more are released before. Halves the steps down to one
        before it preempts the newest sequence.
        """
        if self.pool.windows:
            for seq in self.running:
                seq.first = self.pool.slide(seq.pages, seq.first, seq.n_tokens - 1)
                self._write_tables(seq)
        n_steps = self.steps_per_dispatch
        while (need := sum(missing := self._missing_pages(n_steps))) > self.pool.n_free:
            if n_steps > 1:
                n_steps //= 2
            else:
                self._preempt(self.running[-1], n_missing=need)
                n_steps = self.steps_per_dispatch
        self._allocate(missing)
        return n_steps

    def _missing_pages(self, n_steps: int) -> list[int]:
        """The pages that each running sequence needs for more steps."""
        n_tokens = np.array([seq.n_tokens for seq in self.running], np.int64)
        limits = np.array([seq.max_tokens for seq in self.running], np.int64)
        n_pages = np.array([len(seq.pages) for seq in self.running], np.int64)
        n_cached = np.minimum(n_tokens + n_steps, limits) - 1
        return np.maximum(-(-n_cached // self.pool.page_len) - n_pages, 0).tolist()

    def _allocate(self, n_pages: list[int]) -> None:
        """Gives each running sequence more pages."""
        pages = iter(self.pool.allocate(sum(n_pages)))
        for seq, n in zip(self.running, n_pages, strict=True):
            if n:
                start = len(seq.pages)
                seq.pages += itertools.islice(pages, n)
                self._write_tables(seq, start)

    def _write_tables(self, seq: Sequence, start: int = 0) -> None:
        """Updates the page tables of a running sequence from the page with this index on."""
        for window, pages in self.pool.tables(seq.pages, seq.first, start).items():
            if window not in seq.tables:
                seq.tables[window] = np.zeros(self.pool.pages_for(self.max_len), np.int32)
            seq.tables[window][start : len(seq.pages)] = pages

    def _preempt(self, seq: Sequence, n_missing: int) -> None:
        if len(self.running) == 1:
            raise OutOfPages(
                f"the only running sequence needs {n_missing} more pages, and prefixes hold the "
                "others; release some or raise config.rollout.n_pages"
            )
        self._end(seq)
        self.waiting.insert(bisect.bisect(self.waiting, seq.slot, key=lambda s: s.slot), seq)
        self.n_preempted += 1

    def _start(self, seq: Sequence, plan: DispatchPlan) -> bool:
        """Starts the first waiting sequence, or prefills a chunk of it if the budget is too small.

        Returns False if its pages are not free.
        """
        tokens, n_tokens = seq.cached_tokens(), seq.n_cached_after(plan.n_steps)
        work, adapter = plan.prefill, seq.request.adapter
        try:
            found = self._prefill.allocate(tokens, adapter, n_tokens=n_tokens, work=work)
        except OutOfPages:
            return False
        n_reached = self._prefill.n_reached(len(tokens), found, work)
        if n_reached < len(tokens):
            self._prefill_chunk(seq, tokens[:n_reached], found, work)
            return True
        self.n_cached_tokens += max(found.start - seq.n_chunk_tokens, 0)
        self._prefill.prefill(tokens, found, work, adapter)
        seq.pages, seq.first, seq.state = found.pages, found.first, found.state
        seq.mixed_versions, seq.n_chunk_tokens, seq.running = False, 0, True
        self._write_tables(seq)
        self.running.append(self.waiting.popleft())
        return True

    def _prefill_chunk(
        self, seq: Sequence, chunk: np.ndarray, found: CachedPrefix, work: PrefillWork
    ) -> None:
        """Prefills the first tokens of a sequence, in full pages, which stay in the tree.

        They are more than found. The state after them becomes a snapshot.
        """
        found = self._prefill.shorten(found, len(chunk) // self.pool.page_len)
        adapter = seq.request.adapter
        self._prefill.prefill(chunk, found, work, adapter, snapshot_at_end=False)
        if self.states is not None:
            self._prefill.keep_state(found.state, chunk, found.pages, adapter, work)
        self.pool.release(found.pages, found.first)
        seq.n_chunk_tokens += len(chunk) - found.start

    def _end(self, seq: Sequence, *, keep_state: bool = True) -> None:
        """Releases the pages of a sequence, after adding them to the prefix cache if enabled.

        Its state stays as a snapshot if `keep_state`: dispatches that were not read yet may have
        changed it.
        """
        self.running.remove(seq)
        self._stale |= bool(self.waiting)
        tokens, adapter = seq.cached_tokens(), seq.request.adapter
        kept = self.pool.keep and not seq.mixed_versions
        self.pool.release_windows(seq.pages, seq.first)
        if kept:
            seq.pages = self.pool.add_prefix(tokens, seq.pages, adapter)
        if self.states is not None and kept and keep_state and len(tokens):
            self._prefill.keep_state(seq.state, tokens, seq.pages, adapter, work=None)
        elif self.states is not None:
            self.states.free(seq.state)
        self.pool.release(seq.pages)
        seq.pages, seq.first, seq.state, seq.tables = [], (), ZERO, {}
        seq.running = False
