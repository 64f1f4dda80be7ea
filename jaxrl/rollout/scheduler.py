"""Continuous batching on the host: which sequences run, which wait, and who gets the pages."""

import collections
import dataclasses

import numpy as np

from jaxrl.rollout.api import Prefix, Request
from jaxrl.rollout.pages import OutOfPages, PagePool


class Sequence:
    """A request under way. The last of its tokens has no key in the cache yet: the next step feeds it."""

    def __init__(self, slot: int, request: Request):
        self.slot, self.request = slot, request
        self.prompt = np.asarray(request.tokens, np.int32)
        self.generated: list[int] = []
        self.pages: list[int] = []

    @property
    def n_tokens(self) -> int:
        return len(self.prompt) + len(self.generated)

    @property
    def last_token(self) -> int:
        return self.generated[-1] if self.generated else int(self.prompt[-1])

    @property
    def remaining(self) -> int:
        return self.request.max_tokens - len(self.generated)

    def cached_tokens(self) -> np.ndarray:
        """The tokens whose keys must lie in the cache before the next step."""
        return np.concatenate([self.prompt, np.asarray(self.generated, np.int32)])[:-1]

    def n_cached_after(self, n_steps: int) -> int:
        """Keys in the cache once `n_steps` more steps have run."""
        return self.n_tokens - 1 + min(n_steps, self.remaining)


@dataclasses.dataclass(frozen=True)
class Fill:
    """Keys to compute: those of `tokens` at positions start, start + 1, ..., into `pages`."""

    tokens: np.ndarray
    start: int
    pages: list[int]  # of the sequence from position 0


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the device does next, in this order: fills, copies (from page, to page), decode steps."""

    fills: list[Fill]
    copies: list[tuple[int, int]]
    decode: list[Sequence]
    n_steps: int


class Scheduler:
    """Plans one dispatch after the other.

    Requests start in the order of submission, as soon as a slot and the pages for their prompt and
    the coming steps are free. When running sequences need pages that are not there, the newest of
    them goes back to the queue and computes its keys anew later. The oldest is never sent back and
    fits the pool by itself, so there is always one that makes progress.
    """

    def __init__(self, pool: PagePool, *, max_num_seqs: int, steps_per_dispatch: int, max_len: int):
        self.pool = pool
        self.max_num_seqs, self.max_len = max_num_seqs, max_len
        self.steps_per_dispatch = steps_per_dispatch
        self.waiting: collections.deque[Sequence] = collections.deque()
        self.running: list[Sequence] = []  # in order of submission
        self.n_preempted = 0
        self.n_shared_tokens = 0
        self._next_slot = 0
        # Prompts of waiting requests, and the pages kept for them since a first sample was prefilled.
        self._waiting_prompts: collections.Counter[bytes] = collections.Counter()
        self._kept: dict[bytes, list[int]] = {}

    @property
    def n_unfinished(self) -> int:
        return len(self.waiting) + len(self.running)

    def submit(self, request: Request) -> int:
        """Queues a request. Raises ValueError if it could never run."""
        seq = self._new_sequence(request)
        self.waiting.append(seq)
        self._waiting_prompts[seq.prompt.tobytes()] += 1
        return seq.slot

    def prefill(self, tokens: np.ndarray) -> tuple[Prefix, list[Fill]]:
        """Pages for a prompt, and what must be computed to fill them. Raises OutOfPages, or ValueError
        if the prompt leaves no room for a response."""
        tokens = np.asarray(tokens, np.int32)
        if not 0 < len(tokens) < self.max_len:
            raise ValueError(
                f"a prompt of {len(tokens)} tokens leaves no room for a response in the engine's "
                f"{self.max_len} tokens; raise config.data.max_prompt_len or shorten the prompt"
            )
        pages, fills = self._pages_with(tokens[:-1], n_keys=len(tokens) - 1, copies=None)
        return Prefix(tokens, tuple(pages)), fills

    def insert(self, prefix: Prefix, request: Request) -> tuple[int, list[tuple[int, int]]]:
        """Starts a sequence behind `prefix`. Returns its slot and the page copies that it needs.

        Raises OutOfPages, or ValueError if all slots are taken or the prompts differ.
        """
        if not np.array_equal(prefix.tokens, request.tokens):
            raise ValueError("the request's tokens are not those of the prefix; prefill them first")
        if len(self.running) >= self.max_num_seqs:
            raise ValueError(
                f"all {self.max_num_seqs} slots are taken; free one or raise config.rollout.max_num_seqs"
            )
        seq = self._new_sequence(request)
        n_full, rest = divmod(len(prefix.tokens) - 1, self.pool.page_len)
        tail = self.pool.take(1 if rest else 0)
        seq.pages = self.pool.share(prefix.pages[:n_full]) + tail
        self.running.append(seq)
        return seq.slot, [(prefix.pages[n_full], tail[0])] if rest else []

    def plan(self) -> Plan:
        """Gives the running sequences pages for the coming steps, then starts waiting ones.

        Raises OutOfPages where prefixes of `prefill` hold so many pages that nothing can run.
        """
        n_steps = self._reserve()
        fills: list[Fill] = []
        copies: list[tuple[int, int]] = []
        # Where pages are so few that a dispatch was cut short, a new sequence would soon be sent back.
        if n_steps == self.steps_per_dispatch or not self.running:
            while self.waiting and len(self.running) < self.max_num_seqs:
                if not self._start(self.waiting[0], n_steps, fills, copies):
                    break
        if self.waiting and not self.running:
            n_steps = self._start_alone(fills, copies)
        self._drop_unwanted()  # not earlier: a page to copy from must not be filled anew in this plan
        self.running.sort(key=lambda seq: seq.slot)
        return Plan(fills, copies, list(self.running), n_steps)

    def _start_alone(self, fills: list, copies: list) -> int:
        """Starts the first waiting sequence where nothing runs. Returns the steps that it may make."""
        self._drop_kept()
        for n_steps in (self.steps_per_dispatch, 1):
            if self._start(self.waiting[0], n_steps, fills, copies):
                return n_steps
        raise OutOfPages(
            f"prefixes hold {self.pool.n_used} of {self.pool.n_pages} pages, and the next request does not "
            "fit beside them; release some or raise config.rollout.n_pages"
        )

    def advance(self, seq: Sequence, tokens: list[int], finish: str) -> None:
        """Takes in the tokens that a dispatch made for a running sequence."""
        seq.generated += tokens
        if finish:
            self._end(seq)

    def free(self, slot: int) -> None:
        """Ends a waiting or running sequence. Raises KeyError if there is none."""
        for seq in self.running:
            if seq.slot == slot:
                return self._end(seq)
        for seq in self.waiting:
            if seq.slot == slot:
                self.waiting.remove(seq)
                if not seq.generated:
                    self._waiting_prompts[seq.prompt.tobytes()] -= 1
                    self._drop_unwanted()
                return None
        raise KeyError(f"slot {slot} is neither waiting nor running")

    def release_prefix(self, prefix: Prefix) -> None:
        self.pool.give_back(prefix.pages)

    def _new_sequence(self, request: Request) -> Sequence:
        seq = Sequence(self._next_slot, request)
        n = len(seq.prompt)
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
        self._next_slot += 1
        return seq

    def _reserve(self) -> int:
        """Pages of the running sequences for as many steps as fit, halving down to one before the
        newest of them is sent back. Returns the steps."""
        n_steps = self.steps_per_dispatch
        while (need := self._missing_pages(n_steps)) > self.pool.n_free:
            if self._drop_kept():
                continue
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
        self.running.remove(seq)
        self.pool.give_back(seq.pages)
        seq.pages = []
        if not seq.generated:
            self._waiting_prompts[seq.prompt.tobytes()] += 1
        self.waiting.appendleft(seq)
        self.n_preempted += 1

    def _start(self, seq: Sequence, n_steps: int, fills: list, copies: list) -> bool:
        """Moves the first waiting sequence to the running ones if its pages are free."""
        cached = seq.cached_tokens()
        try:
            pages, new_fills = self._pages_with(
                cached, n_keys=seq.n_cached_after(n_steps), copies=copies
            )
        except OutOfPages:
            return False
        self.waiting.popleft()
        seq.pages = pages
        fills += new_fills
        self.running.append(seq)
        if not seq.generated:
            prompt = seq.prompt.tobytes()
            if self._waiting_prompts[prompt] > 1 and prompt not in self._kept:
                self._kept[prompt] = self.pool.share(pages[: self.pool.pages_of(len(cached))])
            self._waiting_prompts[prompt] -= 1
        return True

    def _pages_with(
        self, tokens: np.ndarray, *, n_keys: int, copies: list[tuple[int, int]] | None
    ) -> tuple[list[int], list[Fill]]:
        """Pages for `n_keys` keys of which the first are those of `tokens`: full pages that hold them
        already are shared, a partly filled one is copied where `copies` is given, the rest is
        to be filled. Raises OutOfPages and changes nothing."""
        pool = self.pool
        found = pool.find(tokens)
        n_full, rest = divmod(len(tokens), pool.page_len)
        tail = found[n_full] if rest and len(found) > n_full and copies is not None else None
        shared = found[:n_full]
        new = pool.take(max(pool.pages_of(n_keys), pool.pages_of(len(tokens))) - len(shared))
        pages = pool.share(shared) + new
        if tail is not None and copies is not None:
            copies.append((tail, new[0]))
        start = len(tokens) if tail is not None else len(shared) * pool.page_len
        self.n_shared_tokens += start
        if start == len(tokens):
            return pages, []
        pool.remember(tokens, pages)
        return pages, [Fill(tokens[start:], start, pages)]

    def _drop_unwanted(self) -> None:
        """Gives back the pages of prompts of which no request waits any more."""
        for prompt in [p for p, n in self._waiting_prompts.items() if n == 0]:
            del self._waiting_prompts[prompt]
            self.pool.give_back(self._kept.pop(prompt, []))

    def _drop_kept(self) -> bool:
        """Gives back the pages kept for waiting samples; false if there were none."""
        dropped = bool(self._kept)
        for pages in self._kept.values():
            self.pool.give_back(pages)
        self._kept.clear()
        return dropped

    def _end(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.pool.give_back(seq.pages)
        seq.pages = []
