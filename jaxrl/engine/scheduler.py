"""Continuous batching on the host: which sequences run, which wait, and who gets the pages."""

import bisect
import collections
import dataclasses

import numpy as np

from jaxrl.engine.api import Prefix, Request
from jaxrl.engine.pages import OutOfPages, PagePool


class Sequence:
    """A request under way. The last of its tokens has no key in the cache yet: the next step feeds it."""

    def __init__(self, slot: int, request: Request):
        self.slot, self.request = slot, request
        self.n_tokens = len(request.tokens)
        self._room = np.empty(self.n_tokens + request.max_tokens, np.int32)
        self._room[: self.n_tokens] = request.tokens
        self.pages: list[int] = []
        self.mixed = False  # its keys come from more than one version of the weights
        self.n_ahead = 0  # keys that were computed for it while it waited

    @property
    def tokens(self) -> np.ndarray:
        """int32, prompt and response so far."""
        return self._room[: self.n_tokens]

    @property
    def last_token(self) -> int:
        return int(self._room[self.n_tokens - 1])

    @property
    def remaining(self) -> int:
        return len(self._room) - self.n_tokens

    def add(self, tokens: list[int]) -> None:
        self._room[self.n_tokens : self.n_tokens + len(tokens)] = tokens
        self.n_tokens += len(tokens)

    def cached_tokens(self) -> np.ndarray:
        """The tokens whose keys must lie in the cache before the next step."""
        return self.tokens[:-1]

    def n_cached_after(self, n_steps: int) -> int:
        """Keys in the cache once `n_steps` more steps have run."""
        return self.n_tokens - 1 + min(n_steps, self.remaining)


@dataclasses.dataclass(frozen=True)
class Fill:
    """Keys to compute: those of `tokens` at positions start, start + 1, ..., into `pages`."""

    tokens: np.ndarray
    start: int
    pages: list[int]  # of the sequence from position 0


Copy = tuple[int, int]  # from page, to page
UNBOUNDED = 1 << 40  # rows


@dataclasses.dataclass
class Plan:
    """What the device does next, in this order."""

    copies: list[Copy] = dataclasses.field(default_factory=list)
    fills: list[Fill] = dataclasses.field(default_factory=list)
    late_copies: list[Copy] = dataclasses.field(default_factory=list)  # of what the fills wrote
    decode: list[Sequence] = dataclasses.field(default_factory=list)
    n_steps: int = 0
    going: list[Sequence] = dataclasses.field(default_factory=list)  # those that ran before
    room: int = UNBOUNDED  # rows that the fills may still take
    written: set[int] = dataclasses.field(default_factory=set)  # pages that the fills write

    @property
    def full(self) -> bool:
        """Whether the fills take all that one dispatch computes. Then `going` make a step beside them, and nobody
        makes another."""
        return self.room == 0


class Scheduler:
    """Plans one dispatch after the other.

    Requests start in the order of submission, as soon as a slot and the pages for their prompt and
    the coming steps are free. When running sequences need pages that are not there, the newest of
    them goes back to the queue and computes its keys anew later, but for those that nobody took in
    the meantime. The oldest is never sent back and fits the pool by itself, so there is always one
    that makes progress.

    While sequences run, a plan computes the keys of at most `rows_per_dispatch` rows of `row_len` tokens. Of a longer
    prompt it computes a part, whose pages stay in the prefix tree without a holder, and the sequence waits on:
    in the next plan it finds them there.
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
        self.version = 0  # of the weights
        self.n_preempted = 0
        self.n_shared_tokens = 0
        self._next_slot = 0
        # Keys of a page for which a copy is made; fewer are sooner computed.
        self._least_copied = max(pool.page_len // 4, 1)

    @property
    def n_unfinished(self) -> int:
        return len(self.waiting) + len(self.running)

    def submit(self, request: Request) -> int:
        """Queues a request. Raises ValueError if it could never run."""
        seq = self._new_sequence(request)
        self.waiting.append(seq)
        return seq.slot

    def set_version(self, version: int) -> None:
        """New weights: no later sequence reads keys of the old ones."""
        if version != self.version:
            self.version = version
            self.pool.forget()
            for seq in self.running:
                seq.mixed = True

    def prefill(self, tokens: np.ndarray) -> tuple[Prefix, Plan]:
        """Pages for a prompt, and what fills them. Raises OutOfPages, or ValueError if the prompt leaves
        no room for a response."""
        tokens = np.asarray(tokens, np.int32)
        if not 0 < len(tokens) < self.max_len:
            raise ValueError(
                f"a prompt of {len(tokens)} tokens leaves no room for a response in the engine's "
                f"{self.max_len} tokens; raise config.data.max_prompt_len or shorten the prompt"
            )
        plan, cached = Plan(), tokens[:-1]
        pages, n_found = self._pages_with(cached, n_keys=len(cached), plan=plan)
        self.n_shared_tokens += n_found
        self._fill(cached, n_found, pages, plan)
        return Prefix(tokens, tuple(pages), self.version), plan

    def insert(self, prefix: Prefix, request: Request) -> tuple[int, Plan]:
        """Starts a sequence behind `prefix`. Returns its slot and the copy that it needs.

        Raises OutOfPages, or ValueError if all slots are taken, the prompts differ, or the weights
        have changed since.
        """
        if not np.array_equal(prefix.tokens, request.tokens):
            raise ValueError("the request's tokens are not those of the prefix; prefill them first")
        if prefix.version != self.version:
            raise ValueError(
                f"the prefix was computed by weights of version {prefix.version}, the engine has version "
                f"{self.version}; prefill it again"
            )
        if len(self.running) >= self.max_num_seqs:
            raise ValueError(
                f"all {self.max_num_seqs} slots are taken; free one or raise config.rollout.max_num_seqs"
            )
        seq = self._new_sequence(request)
        n_full, rest = divmod(len(prefix.tokens) - 1, self.pool.page_len)
        tail = self.pool.take(1 if rest else 0)
        seq.pages = self.pool.share(prefix.pages[:n_full]) + tail
        self.running.append(seq)
        return seq.slot, Plan(copies=[(prefix.pages[n_full], tail[0])] if rest else [])

    def plan(self, *, others_wait: bool = False) -> Plan:
        """Gives the running sequences pages for the coming steps, then starts waiting ones. Where `others_wait` for
        what is computed, it is no more than a dispatch.

        Raises OutOfPages where prefixes of `prefill` hold so many pages that nothing can run.
        """
        plan = Plan(n_steps=self._reserve(), going=sorted(self.running, key=lambda seq: seq.slot))
        if others_wait and self.pool.keep:
            plan.room = self.rows_per_dispatch
        # Where pages are so few that a dispatch was cut short, a new sequence would soon be sent back.
        if plan.n_steps == self.steps_per_dispatch or not self.running:
            while self.waiting and len(self.running) < self.max_num_seqs and not plan.full:
                if not self._start(self.waiting[0], plan):
                    break
        if self.waiting and not self.running and not plan.full:
            self._start_with_one_step(plan)
        self.running.sort(key=lambda seq: seq.slot)
        plan.decode = list(self.running)
        return plan

    def _start_with_one_step(self, plan: Plan) -> None:
        """Starts the first waiting sequence where nothing runs, and has not the pages for more steps."""
        plan.n_steps = 1
        if not self._start(self.waiting[0], plan):
            raise OutOfPages(
                f"prefixes hold {self.pool.n_used} of {self.pool.n_pages} pages, and the next request does "
                "not fit beside them; release some or raise config.rollout.n_pages"
            )

    def advance(self, seq: Sequence, tokens: list[int], finish: str) -> None:
        """Takes in the tokens that a dispatch made for a running sequence."""
        seq.add(tokens)
        if finish:
            self._end(seq)

    def free(self, slot: int) -> None:
        """Ends a waiting or running sequence. Raises KeyError if there is none."""
        for seq in self.running:
            if seq.slot == slot:
                return self._end(seq)
        for seq in self.waiting:
            if seq.slot == slot:
                return self.waiting.remove(seq)
        raise KeyError(f"slot {slot} is neither waiting nor running")

    def release_prefix(self, prefix: Prefix) -> None:
        self.pool.give_back(prefix.pages)

    def _new_sequence(self, request: Request) -> Sequence:
        self.check(request)
        self._next_slot += 1
        return Sequence(self._next_slot - 1, request)

    def check(self, request: Request) -> None:
        """Raises ValueError if the request could never run."""
        n = len(request.tokens)
        if n == 0 or request.max_tokens < 1:
            raise ValueError(
                f"a request needs a prompt token and max_tokens of 1 or more, got {n} and {request.max_tokens}"
            )
        if n + request.max_tokens > self.max_len:
            raise ValueError(
                f"a prompt of {n} tokens and max_tokens {request.max_tokens} pass the engine's "
                f"{self.max_len} tokens; raise config.data.max_prompt_len or config.data.max_response_len"
            )
        need = self.pool.pages_of(n - 1 + request.max_tokens)
        if need > self.pool.n_pages:
            raise ValueError(
                f"a prompt of {n} tokens and max_tokens {request.max_tokens} need {need} KV pages, the pool "
                f"has {self.pool.n_pages}; raise config.rollout.n_pages or config.rollout.memory_utilization"
            )

    def _reserve(self) -> int:
        """Pages of the running sequences for as many steps as fit, halving down to one before the
        newest of them is sent back. Returns the steps."""
        n_steps = self.steps_per_dispatch
        while (need := self._missing_pages(n_steps)) > self.pool.n_free:
            if n_steps > 1:
                n_steps //= 2
            else:
                self._preempt(self.running[-1], n_missing=need)
                n_steps = self.steps_per_dispatch
        for seq in self.running:
            n = self.pool.pages_of(seq.n_cached_after(n_steps)) - len(seq.pages)
            seq.pages += self.pool.take(max(n, 0))
        return n_steps

    def _missing_pages(self, n_steps: int) -> int:
        pages_of = self.pool.pages_of
        return sum(
            max(pages_of(seq.n_cached_after(n_steps)) - len(seq.pages), 0) for seq in self.running
        )

    def _preempt(self, seq: Sequence, n_missing: int) -> None:
        if len(self.running) == 1:
            raise OutOfPages(
                f"the only running sequence lacks {n_missing} pages while prefixes hold the others; "
                "release some or raise config.rollout.n_pages"
            )
        self._end(seq)
        self.waiting.insert(bisect.bisect(self.waiting, seq.slot, key=lambda s: s.slot), seq)
        self.n_preempted += 1

    def _start(self, seq: Sequence, plan: Plan) -> bool:
        """Moves the first waiting sequence to the running ones, or computes some of its keys where the plan has no
        room for all. Returns whether its pages are free."""
        tokens, n_keys = seq.cached_tokens(), seq.n_cached_after(plan.n_steps)
        try:
            pages, n_found = self._pages_with(tokens, n_keys=n_keys, plan=plan)
        except OutOfPages:
            return False
        if len(tokens) - n_found > plan.room * self.row_len:
            n = (n_found + plan.room * self.row_len) // self.pool.page_len  # more than were found
            self.pool.give_back(pages[n:])
            part = tokens[: n * self.pool.page_len]
            self._fill(part, n_found, pages[:n], plan)
            self.pool.give_back(pages[:n])
            seq.n_ahead += len(part) - n_found
            return True
        self.n_shared_tokens += max(n_found - seq.n_ahead, 0)
        self._fill(tokens, n_found, pages, plan)
        seq.pages, seq.mixed, seq.n_ahead = pages, False, 0
        self.running.append(self.waiting.popleft())
        return True

    def _pages_with(self, tokens: np.ndarray, *, n_keys: int, plan: Plan) -> tuple[list[int], int]:
        """Pages for `n_keys` keys of which the first are those of `tokens`, and how many of these they have: full pages
        that hold them already are shared, a page that holds some of the next is copied.
        Raises OutOfPages and changes nothing."""
        pool = self.pool
        found = pool.find(tokens)
        pages = pool.share(found.pages)
        try:
            n_new = max(pool.pages_of(n_keys), pool.pages_of(len(tokens))) - len(pages)
            pages += pool.take(n_new)
        except OutOfPages:
            pool.give_back(pages)
            raise
        start = len(found.pages) * pool.page_len
        # Copies come before the fills, which go on behind them, and before any new use of a copied page
        # that `take` took. What a fill of this plan has yet to write is copied late, and must be complete.
        late = found.tail in plan.written
        complete = start + found.n_tail == len(tokens)
        if complete or (not late and found.n_tail >= self._least_copied):
            if found.n_tail:
                copies = plan.late_copies if late else plan.copies
                copies.append((found.tail, pages[len(found.pages)]))
            start += found.n_tail
        return pages, start

    def _fill(self, tokens: np.ndarray, start: int, pages: list[int], plan: Plan) -> None:
        """Has the keys of the tokens from `start` on computed."""
        if start < len(tokens):
            plan.fills.append(Fill(tokens[start:], start, pages))
            plan.room -= -(-(len(tokens) - start) // self.row_len)
            plan.written.update(
                pages[start // self.pool.page_len : self.pool.pages_of(len(tokens))]
            )
            self.pool.remember(tokens, pages)

    def _end(self, seq: Sequence) -> None:
        """Takes a sequence's pages; what they hold stays known where the pool keeps it."""
        self.running.remove(seq)
        if self.pool.keep and not seq.mixed:
            seq.pages = self.pool.remember(seq.cached_tokens(), seq.pages)
        self.pool.give_back(seq.pages)
        seq.pages = []
