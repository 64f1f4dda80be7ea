"""Property tests of scheduler.py and pages.py, driven by hypothesis.

Requests, turns, cancellations, prefixes, new weights and full pools come in any order. The results
are compared with a model of device memory that has no tree and no reference counts.
"""

import collections
import dataclasses

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from jaxrl.engine.api import Request
from jaxrl.engine.pages import FREED, ROOT, OutOfPages, PagePool, read_only
from jaxrl.engine.prefill import PrefillWork
from jaxrl.engine.scheduler import DispatchPlan, Scheduler
from jaxrl.engine.sequence import Sequence
from jaxrl.engine.states import StateSlots
from jaxrl.engine.windows import WindowPages

MAX_LEN = 24
TOKENS = st.integers(0, 1)  # so few that common prefixes and repeated samples are frequent
WRONG = 2  # a token that is never sampled
PROMPTS = st.lists(TOKENS, min_size=1, max_size=10)
NOTHING = frozenset(), ()  # the policy versions and tokens of the state before the first token


def n_common(a, b) -> int:
    pairs = [x == y for x, y in zip(a, b, strict=False)]
    return pairs.index(False) if False in pairs else len(pairs)


@given(st.integers(1, 4), st.lists(st.lists(TOKENS, max_size=12), max_size=12), PROMPTS)
@settings(derandomize=True, deadline=None, max_examples=300)
def test_the_tree_finds_the_longest_prefix_of_any_earlier_sequence(page_len, ended, wanted):
    pool = PagePool(100, page_len)
    for tokens in ended:
        row = np.array(tokens, np.int32)
        pool.release(pool.add_prefix(row, pool.allocate(pool.pages_for(len(tokens)))))
    found = pool.match_prefix(np.array(wanted, np.int32))
    n_found = len(found.pages) * page_len + found.n_partial
    assert n_found == max([n_common(tokens, wanted) for tokens in ended], default=0)
    assert pool.n_used == 0


class Device:
    """The memory of the pool and of its windows. The KV of a token is what it was computed from.

    That is the set of policy versions, and the tokens up to its own. A state is represented by that
    of the last token in it. Page tables are those of `PagePool.tables`, by window.
    """

    def __init__(self, pool: PagePool, n_slots: int):
        self.page_len = pool.page_len
        sizes = {0: pool.n_pages, **{w.window: w.n_pages for w in pool.windows}}
        self.pages = {w: [[None] * self.page_len for _ in range(n)] for w, n in sizes.items()}
        self.slots = [NOTHING] * n_slots

    def read(self, tables, position: int, window: int = 0):
        """The KV of a position. Fails for a page that is freed."""
        page = tables[window][position // self.page_len]
        assert page != FREED, "read of a freed page"
        page = page if page >= 0 else read_only(page)  # its own inverse
        return self.pages[window][page][position % self.page_len]

    def write(self, tables, position: int, token: int, version: int) -> None:
        """The KV of a position, from the KV that it sees in the layers of every window."""
        for window, table in tables.items():
            seen = range(max(position - window + 1, 0) if window else 0, position)
            kv = [self.read(tables, i, window) for i in seen]
            versions, tokens = kv[-1] if kv else NOTHING
            assert [len(before) for _, before in kv] == [i + 1 for i in seen]
            assert all(tokens[: len(before)] == before for _, before in kv)
            page = table[position // self.page_len]
            if page >= 0:
                key = versions | {version}, (*tokens, token)
                self.pages[window][page][position % self.page_len] = key

    def copy(self, copies) -> None:
        for pairs in copies:
            for i, pages in enumerate(self.pages.values()):
                source, target = pairs[2 * i : 2 * i + 2]
                pages[target] = list(pages[source])

    def prepare(self, work: PrefillWork, version: int) -> None:
        """In the order of the engine: copies, prefill, post-prefill copies."""
        self.copy(work.copies)
        for source, target in work.state_copies:
            self.slots[target] = self.slots[source]
        written = {}  # slot -> index of the last chunk that writes it
        for n, chunk in enumerate(work.chunks):
            for i, token in enumerate(chunk.tokens.tolist(), chunk.start):
                self.write(chunk.tables, i, token, version)
            if self.slots:
                versions, tokens = self.slots[chunk.source]
                assert len(tokens) == chunk.start and chunk.target != 0
                # Rows are computed in parallel, except those that continue the one before.
                assert written.get(chunk.source, n - 1) == n - 1
                written[chunk.target] = n
                last = chunk.start + len(chunk.tokens) - 1
                state = versions | {version}, (*tokens, *chunk.tokens.tolist())
                assert self.read(chunk.tables, last) == state
                self.slots[chunk.target] = state
        self.copy(work.post_prefill_copies)
        for source, target in work.post_prefill_state_copies:
            self.slots[target] = self.slots[source]


@dataclasses.dataclass
class Decoded:
    """A sequence after a dispatch: all its tokens, the KV that it wrote, why it ended."""

    seq: Sequence
    tokens: list[int]
    keys: list
    finish: str


class Machine(RuleBasedStateMachine):
    @initialize(
        n_pages=st.integers(2, 24),
        page_len=st.sampled_from([1, 2, 4, 8]),
        max_num_seqs=st.integers(1, 5),
        steps=st.sampled_from([1, 3, 8]),
        keep=st.sampled_from([True, True, True, False]),
        n_drafts=st.sampled_from([0, 3]),
        n_rows=st.sampled_from([1, 1, 2, 8]),
        n_snapshots=st.sampled_from([0, 0, 1, 2, 12]),  # 0: a model without states
        windows=st.sampled_from([(), (2,), (5,), (3, 8)]),
        n_more=st.sampled_from([0, 2, 8]),  # pages of a window, more than one sequence needs
    )
    def begin(
        self,
        n_pages,
        page_len,
        max_num_seqs,
        steps,
        keep,
        n_drafts,
        n_rows,
        n_snapshots,
        windows,
        n_more,
    ):
        self.n_drafts = 0 if n_snapshots else n_drafts
        n_drafts = self.n_drafts
        states = StateSlots(1 + max_num_seqs + n_snapshots) if n_snapshots else None
        n_window = min(n_pages, -(-MAX_LEN // page_len) + n_more)
        windows = [] if n_snapshots else [WindowPages(n_window, page_len, w) for w in windows]
        self.s = Scheduler(
            PagePool(n_pages, page_len, keep=keep, windows=windows),
            max_num_seqs=max_num_seqs,
            steps_per_dispatch=steps * (1 + n_drafts),
            max_len=MAX_LEN,
            row_len=page_len,
            rows_per_dispatch=n_rows,
            states=states,
        )
        self.device = Device(self.s.pool, states.n_slots if states else 0)
        self.version = 0
        self.prefixes = []
        self.inserted: set[int] = set()
        self.ran: set[int] = set()  # since an earlier plan, or inserted
        self.unfinished: dict[int, Request] = {}
        self.keys: dict[int, list] = {}  # the KV that every running sequence must find
        self.turns: list[list[int]] = []  # tokens of ended sequences

    # Events

    @rule(prompt=PROMPTS, max_tokens=st.integers(1, 12), n=st.integers(1, 3))
    def submit(self, prompt, max_tokens, n):
        for sample in range(n):
            request = Request(np.array(prompt, np.int32), max_tokens, sample=sample)
            try:
                self.unfinished[self.s.submit(request)] = request
            except ValueError as refused:
                need = -(-(len(prompt) - 1 + max_tokens) // self.device.page_len)
                assert "KV pages" in str(refused) and need > self.s.pool.n_pages

    @rule(prompt=st.lists(TOKENS, min_size=12, max_size=20), max_tokens=st.integers(1, 4))
    def submit_a_long_prompt(self, prompt, max_tokens):
        self.submit(prompt, max_tokens, 1)

    @precondition(lambda self: self.turns)
    @rule(data=st.data(), more=st.lists(TOKENS, max_size=4), max_tokens=st.integers(1, 6))
    def continue_a_conversation(self, data, more, max_tokens):
        earlier = data.draw(st.sampled_from(self.turns))
        self.submit([*earlier, *more][: MAX_LEN - max_tokens], max_tokens, 1)

    @precondition(lambda self: self.unfinished)
    @rule(data=st.data())
    def cancel(self, data):
        slot = data.draw(st.sampled_from(sorted(self.unfinished)))
        runs = any(seq.slot == slot for seq in self.s.running)
        self.s.free(slot)
        del self.unfinished[slot]
        assert not runs or self.s.extension(1) is None  # its row must leave the batch

    @rule(version=st.integers(0, 2))
    def publish_weights(self, version):
        self.version = version
        self.s.set_version(version)

    @precondition(lambda self: len(self.prefixes) < 2)
    @rule(prompt=PROMPTS)
    def prefill(self, prompt):
        try:
            prefix, work = self.s.prefill(np.array(prompt, np.int32))
        except OutOfPages:
            return
        self.device.prepare(work, self.version)
        self.prefixes.append(prefix)

    @precondition(lambda self: self.prefixes)
    @rule(data=st.data(), max_tokens=st.integers(1, 6))
    def insert(self, data, max_tokens):
        prefix = data.draw(st.sampled_from(self.prefixes))
        request = Request(prefix.tokens, max_tokens)
        try:
            slot, work = self.s.insert(prefix, request)
        except OutOfPages:
            return
        except ValueError as refused:
            full = len(self.s.running) == self.s.max_num_seqs
            assert full or prefix.version != self.version or "KV pages" in str(refused)
            return
        self.device.prepare(work, self.version)
        self.inserted.add(slot)
        self.ran.add(slot)
        self.unfinished[slot] = request
        self.expect_keys(self.s.running)

    @precondition(lambda self: self.prefixes)
    @rule(data=st.data())
    def release(self, data):
        i = data.draw(st.integers(0, len(self.prefixes) - 1))
        self.s.release_prefix(self.prefixes.pop(i))

    @rule(data=st.data())
    def dispatch(self, data):
        limit_prefill = data.draw(st.sampled_from([True, True, True, False]))
        n_preempted = self.s.n_preempted
        try:
            plan = self.s.plan(limit_prefill=limit_prefill)
        except OutOfPages:
            assert self.prefixes, "the pool is full without prefixes"
            return
        self.device.prepare(plan.prefill, self.version)
        self.expect_keys(plan.decode)
        n_preempted = self.s.n_preempted - n_preempted
        self.check_rows(plan, n_preempted, bounded=limit_prefill and self.s.pool.keep)
        for seq in plan.decode:
            for window in seq.tables:
                n = len(self.keys[seq.slot])
                for i in range(max(n - window + 1, 0) if window else 0, n):
                    assert self.device.read(seq.tables, i, window) == self.keys[seq.slot][i]
            if self.s.states is not None:
                assert self.device.slots[seq.state] == (self.keys[seq.slot] or [NOTHING])[-1]
        rows, n_steps = (plan.previously_running, 1) if plan.full else (plan.decode, plan.n_steps)
        if plan.previously_running or not plan.full:
            self.check_progress(rows)
        first = [self.decode(seq, seq.tokens.tolist(), n_steps, data) for seq in rows]
        second = []
        n_pages = None if plan.full else self.s.extension(2 * n_steps)
        if n_pages is not None and data.draw(st.booleans()):
            self.s.extend(n_pages)
            unfinished = [one for one in first if not one.finish]
            second = [self.decode(one.seq, one.tokens, n_steps, data) for one in unfinished]
        self.read(first)
        if second:
            self.read_ahead(second, data)

    # Effects of an event

    def decode(self, seq: Sequence, tokens: list[int], n_steps: int, data) -> "Decoded":
        """Every step writes the KV of the last token and of draft tokens, then samples a token.

        All draft tokens are wrong; there are as many as further tokens may follow in this dispatch.
        Without `data`, as many tokens as possible are sampled.
        """
        most, start = min(n_steps, seq.max_tokens - len(tokens)), len(tokens) - 1
        drawn = data.draw(st.lists(TOKENS, min_size=1, max_size=n_steps)) if data else [1] * most
        tokens, keys = [*tokens, *drawn[:most]], []
        for i in range(start, len(tokens) - 1):
            self.device.write(seq.tables, i, tokens[i], self.version)
            for ahead in range(1, min(self.n_drafts, start + most - i - 1) + 1):
                self.device.write(seq.tables, i + ahead, WRONG, self.version)
            keys.append(self.device.read(seq.tables, i))
            if self.s.states is not None:
                versions, before = self.device.slots[seq.state]
                self.device.slots[seq.state] = versions | {self.version}, (*before, tokens[i])
        stops = data is not None and data.draw(st.booleans())
        finish = "length" if len(tokens) == seq.max_tokens else "stop" * stops
        return Decoded(seq, tokens, keys, finish)

    def read(self, decoded: list["Decoded"]) -> None:
        """The tokens of a dispatch reach the scheduler, except those of cancelled sequences."""
        for one in decoded:
            seq = one.seq
            if seq.slot not in self.unfinished:
                continue
            self.keys[seq.slot] += one.keys
            self.s.advance(seq, one.tokens[seq.n_tokens :], one.finish)
            if one.finish:
                request = self.unfinished.pop(seq.slot)
                assert seq.n_tokens <= len(request.tokens) + request.max_tokens
                self.turns.append(seq.tokens.tolist())

    def read_ahead(self, decoded: list["Decoded"], data) -> None:
        """A dispatch that followed another unread one: read, or dropped because weights change."""
        event = data.draw(st.sampled_from(["", "cancel", "submit", "weights"]))
        if event == "cancel" and self.unfinished:
            self.cancel(data)
        elif event == "submit":
            self.submit(data.draw(PROMPTS), 4, 1)
        if event == "weights" and self.s.states is None:
            self.publish_weights(self.version + 1)
        else:
            self.read(decoded)

    def expect_keys(self, running: list[Sequence]) -> None:
        """A sequence that starts finds all its KV, of the current policy version."""
        for seq in running:
            if seq.slot not in self.keys:
                row = tuple(seq.cached_tokens().tolist())
                now = frozenset({self.version})
                self.keys[seq.slot] = [(now, row[: i + 1]) for i in range(len(row))]

    def check_rows(self, plan: DispatchPlan, n_preempted: int, *, bounded: bool) -> None:
        """Prefill while others decode is at most one dispatch, without new sequences.

        A sequence that was preempted may start again in the same plan, on shared pages.
        """
        n_rows = sum(-(-len(chunk.tokens) // self.s.row_len) for chunk in plan.prefill.chunks)
        assert plan.full == (bounded and n_rows == self.s.rows_per_dispatch)
        assert not bounded or n_rows <= self.s.rows_per_dispatch
        begun = {seq.slot for seq in plan.decode} - {seq.slot for seq in plan.previously_running}
        assert len(begun & self.ran) <= n_preempted
        assert {seq.slot for seq in plan.previously_running} <= self.ran
        self.ran = {seq.slot for seq in plan.decode}

    def check_progress(self, rows: list[Sequence]) -> None:
        """The oldest request samples a token in every dispatch, so no request starves.

        Prefixes and sequences that a caller holds (`prefill`, `insert`) may block others.
        """
        running = {seq.slot for seq in rows}
        if self.unfinished:
            assert running
            if not self.prefixes and not running & self.inserted:
                assert min(self.unfinished) in running

    @invariant()
    def slots_are_those_not_ended(self):
        if not hasattr(self, "s"):
            return
        slots = [q.slot for q in [*self.s.running, *self.s.waiting]]
        assert sorted(slots) == sorted(self.unfinished)
        assert [q.slot for q in self.s.waiting] == sorted(q.slot for q in self.s.waiting)
        running = {q.slot for q in self.s.running}
        self.keys = {slot: keys for slot, keys in self.keys.items() if slot in running}

    @invariant()
    def reference_counts_match_the_references(self):
        if not hasattr(self, "s"):
            return
        pool, held = self.s.pool, np.zeros(self.s.pool.n_pages, int)
        for pages in [q.pages for q in self.s.running] + [p.pages for p in self.prefixes]:
            assert len(set(pages)) == len(pages)
            np.add.at(held, np.array(pages, int), 1)
        assert [pool._ref_counts[p] for p in range(pool.n_pages)] == held.tolist()
        assert pool.n_used == int((held > 0).sum())
        assert all(not q.pages for q in self.s.waiting)
        free = [*pool._empty, *pool._cached]
        assert sorted(free) == np.flatnonzero(held == 0).tolist()
        assert all(page not in pool._tree for page in pool._empty)
        if not pool.keep:
            assert not pool._cached

    @invariant()
    def device_pages_of_windows_are_those_that_sequences_see(self):
        if not hasattr(self, "s"):
            return
        pool, holders = self.s.pool, [*self.s.running, *self.prefixes]
        for n, window in enumerate(pool.windows):
            seen = [page for h in holders for page in h.pages[h.first[n] :]]
            assert window._ref_counts == collections.Counter(seen)
            assert sorted(window._device) == sorted({*seen, *window._cached})
            assert sorted([*window._device.values(), *window._empty]) == list(range(window.n_pages))
            assert all(page in pool._tree or pool._ref_counts[page] for page in window._cached)
            for seq in self.s.running:  # a sequence writes to its pages alone
                assert all(
                    seen.count(p) == 1 for p in seq.pages[(seq.n_tokens - 1) // pool.page_len :]
                )

    @invariant()
    def every_slot_of_state_has_one_owner(self):
        if not hasattr(self, "s") or self.s.states is None:
            return
        states = self.s.states
        held = [q.state for q in self.s.running] + [p.state for p in self.prefixes]
        slots = [0, *held, *states._snapshots, *states._free]
        assert sorted(slots) == list(range(states.n_slots))
        assert states.n_used == len(held)
        assert all(not q.state for q in self.s.waiting)
        assert self.device.slots[0] == NOTHING

    @invariant()
    def snapshots_are_the_states_of_their_prefixes(self):
        if not hasattr(self, "s") or self.s.states is None:
            return
        place = self.s.pool._tree._nodes
        for parent, known in self.s.states._by_parent.items():
            before = []
            while parent != ROOT:
                parent, part = place[parent]
                before = [*np.frombuffer(part, np.int32).tolist(), *before]
            for tokens, slot in known.items():
                prefix = (*before, *np.frombuffer(tokens, np.int32).tolist())
                assert self.device.slots[slot] == (frozenset({self.version}), prefix)

    @invariant()
    def no_sequence_writes_to_a_page_that_another_reads(self):
        if not hasattr(self, "s"):
            return
        n = self.device.page_len
        holds = [p.pages for p in self.prefixes] + [q.pages for q in self.s.running]
        for seq in self.s.running:
            for page in seq.pages[(seq.n_tokens - 1) // n :]:
                assert sum(page in pages for pages in holds) == 1

    @invariant()
    def the_tree_describes_the_pages(self):
        """A page in the tree has the KV of its path. If referenced, so are its ancestors."""
        if not hasattr(self, "s"):
            return
        pool = self.s.pool
        place = pool._tree._nodes
        for page in place:
            tokens, path = [], [page]
            while path[0] != ROOT:
                before, part = place[path[0]]
                tokens = [*np.frombuffer(part, np.int32).tolist(), *tokens]
                path = [before, *path]
            for i in range(len(tokens)):
                want = frozenset({self.version}), tuple(tokens[: i + 1])
                assert self.device.read({0: path[1:]}, i) == want
            here = range((len(path) - 2) * pool.page_len, len(tokens))
            for window in pool.windows:
                if not window.missing([page]):
                    table = {window.window: [window.device_page(page)] * len(path)}
                    for i in here:
                        want = frozenset({self.version}), tuple(tokens[: i + 1])
                        assert self.device.read(table, i, window.window) == want
            if pool._ref_counts[page]:
                assert all(pool._ref_counts[p] for p in path[1:])

    def teardown(self):
        """Without new requests everything ends, and every page can be allocated again."""
        if not hasattr(self, "s"):
            return
        for prefix in self.prefixes:
            self.s.release_prefix(prefix)
        self.prefixes = []
        most = sum(request.max_tokens for request in self.unfinished.values())
        for _ in range(most):
            plan = self.s.plan(limit_prefill=bool(self.s.running))
            self.device.prepare(plan.prefill, self.version)
            self.expect_keys(plan.decode)
            rows, n_steps = (
                (plan.previously_running, 1) if plan.full else (plan.decode, plan.n_steps)
            )
            self.read([self.decode(seq, seq.tokens.tolist(), n_steps, None) for seq in rows])
        assert self.s.n_unfinished == 0
        pool = self.s.pool
        assert pool.n_used == 0
        assert all(window.n_free == window.n_pages for window in pool.windows)
        pages = pool.allocate(pool.n_free)
        assert len(set(pages)) == min([pool.n_pages, *(w.n_pages for w in pool.windows)])


@pytest.mark.parametrize("n_runs", [50, pytest.param(400, marks=pytest.mark.thorough)])
def test_pages_and_queues_keep_their_invariants_in_any_order_of_events(n_runs):
    run_state_machine_as_test(
        Machine,
        settings=settings(
            derandomize=True,
            deadline=None,
            max_examples=n_runs,
            stateful_step_count=50,
            suppress_health_check=list(HealthCheck),
        ),
    )
