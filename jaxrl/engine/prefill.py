"""Prefill of sequences: the pages and the state that they find, and the work that is left."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxrl.engine.images import ImageTable
from jaxrl.engine.pages import (
    FREED,
    ITEM,
    OutOfPages,
    PagePool,
    PrefixMatch,
    read_only,
    root,
)
from jaxrl.engine.states import ZERO, StateSlots


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
    axes: np.ndarray | None = None  # int32 [n, 3], positions by axis; None: those of text
    ahead: np.ndarray | None = None  # int32 [n], last positions that tokens see; None: their own


PageCopy = tuple[int, ...]  # from page, to page; the same of the device pages by window
StateCopy = tuple[int, int]  # from slot, to slot
UNLIMITED = 1 << 40  # rows


@dataclasses.dataclass
class PrefillWork:
    """The prefill of one dispatch with its copies, executed in the order of the fields."""

    copies: list[PageCopy] = dataclasses.field(default_factory=list)
    state_copies: list[StateCopy] = dataclasses.field(default_factory=list)
    chunks: list[PrefillChunk] = dataclasses.field(default_factory=list)
    # Copies of pages and of states that the chunks write.
    post_prefill_copies: list[PageCopy] = dataclasses.field(default_factory=list)
    post_prefill_state_copies: list[StateCopy] = dataclasses.field(default_factory=list)
    row_budget: int = UNLIMITED  # rows that may still be added
    written_pages: set[int] = dataclasses.field(default_factory=set)  # by the chunks
    written_states: set[int] = dataclasses.field(default_factory=set)  # snapshots, by the chunks
    pinned_states: set[int] = dataclasses.field(default_factory=set)  # snapshots in use


@dataclasses.dataclass(frozen=True)
class CachedPrefix:
    """Pages of a sequence, and how many of its first tokens need no computation."""

    pages: list[int]
    first: tuple[int, ...]  # by window, index of the first page that the token after `start` sees
    n_shared: int  # pages that are shared: their KV is not written
    # By window, shared pages that had no device page: their KV is written in its layers.
    fresh: tuple[list[int], ...]
    n_found: int  # tokens whose KV is in the prefix tree
    n_cached: int  # tokens whose KV is in the pages
    # Tokens to skip in prefill; fewer than `n_cached` if a state or device pages are missing.
    start: int
    source: int  # slot of the state after `start` tokens
    state: int  # the sequence's own slot


class PrefillPlanner:
    """Finds the cached prefixes of sequences, allocates the rest, and plans their prefill.

    Sequences of models with a state also need a slot of it. Prefill leaves a snapshot of the state
    after the prompt, which its other samples start from, and after a prefix whose pages were found
    without one.
    """

    def __init__(
        self,
        pool: PagePool,
        states: StateSlots | None,
        row_len: int,
        images: ImageTable | None = None,
    ):
        self.pool, self.states, self.row_len, self.images = pool, states, row_len, images
        # Copy a page for at least this many tokens; computing fewer is faster than a copy.
        self._min_copied_tokens = max(pool.page_len // 4, 1)
        if states is not None:
            pool.on_remove = states.forget

    def allocate(
        self, tokens: np.ndarray, adapter: int, *, n_tokens: int, work: PrefillWork
    ) -> CachedPrefix:
        """Pages for `n_tokens` tokens that start with `tokens`, some already cached, and a state.

        Full pages in the prefix cache are shared, a partly matching page is copied. Raises
        OutOfPages and changes nothing if too few pages or slots of state are free.
        """
        pool = self.pool
        found = pool.match_prefix(tokens, adapter)
        start, source = len(tokens), ZERO
        if self.states is not None:
            start, source = self._find_state(self.states, tokens, found, adapter, work)
        n_shared, n_cached = len(found.pages), len(found.pages) * pool.page_len
        n_found = n_cached + found.n_partial
        copied = self._copies_partial(found, start, len(tokens), work)
        partial = pool.device_pages(found.partial) if copied else ()
        if copied:
            n_cached = n_found
        else:
            start = min(start, pool.n_visible(found.pages) * pool.page_len)
        start = min(start, n_cached)
        first = tuple(window.first(start) for window in pool.windows)
        in_windows = [found.pages[i:] for i in first]
        fresh = tuple(
            window.missing(pages) for window, pages in zip(pool.windows, in_windows, strict=True)
        )
        n_pages = max(pool.pages_for(n_tokens), pool.pages_for(len(tokens)))
        pages = pool.take(found.pages, n_pages - n_shared, first)
        state = self.allocate_state(pages, work)
        if copied:
            late = found.partial in work.written_pages
            copies = work.post_prefill_copies if late else work.copies
            copies.append(page_copy(partial, pool.device_pages(pages[n_shared])))
        return CachedPrefix(pages, first, n_shared, fresh, n_found, n_cached, start, source, state)

    def _copies_partial(
        self, found: PrefixMatch, start: int, n_tokens: int, work: PrefillWork
    ) -> bool:
        """Whether to copy the page that matches in part.

        Copies run before prefill, which writes after the copied tokens, and before a copied page
        that an allocation evicted is reused. A page that this dispatch still has to write is
        copied after it, and only if nothing is left to compute.
        """
        n_cached = len(found.pages) * self.pool.page_len
        n_found = n_cached + found.n_partial
        unwritten = found.partial in work.written_pages
        complete = n_found == n_tokens
        finished = complete and start == n_tokens
        needed = self.states is not None and start > n_cached
        worth = complete or needed or found.n_partial >= self._min_copied_tokens
        if not found.n_partial or not (finished or (worth and not unwritten)):
            return False
        return self.pool.visible([*found.pages, found.partial], n_found)

    def _find_state(
        self,
        states: StateSlots,
        tokens: np.ndarray,
        found: PrefixMatch,
        adapter: int,
        work: PrefillWork,
    ) -> tuple[int, int]:
        """(n, slot) of the longest snapshot: the state after n tokens, whose KV is in `found`.

        Snapshots and pages that this dispatch writes count only if nothing is left to
        compute.
        """
        page_len, whole = self.pool.page_len, tokens.tobytes()
        unwritten = found.partial in work.written_pages
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
                match = states.longest(parent, after, work.written_states)
            if match is not None:
                known, slot = match
                work.pinned_states.add(slot)
                states.use(slot)
                return i * page_len + len(known) // ITEM, slot
        return 0, ZERO

    def allocate_state(self, pages: list[int], work: PrefillWork) -> int:
        """A slot of state for a sequence with these pages, which are released if there is none."""
        if self.states is None:
            return ZERO
        try:
            return self.states.allocate(work.pinned_states)
        except OutOfPages:
            self.pool.release(pages)
            raise

    def n_reached(self, n_tokens: int, found: CachedPrefix, work: PrefillWork) -> int:
        """Tokens that `prefill` computes within the row budget: all, or those of full pages."""
        page_len, n_rows = self.pool.page_len, work.row_budget
        reached, border = found.start + n_rows * self.row_len, found.n_shared * page_len
        if self.states is not None and found.start < border < min(n_tokens, reached):
            n_rows -= self._n_rows(border - found.start)  # the state at the border ends a row
            reached = border + n_rows * self.row_len
        return n_tokens if n_tokens <= reached else reached // page_len * page_len

    def _n_rows(self, n_tokens: int) -> int:
        return -(-n_tokens // self.row_len)

    def shorten(self, found: CachedPrefix, n_pages: int) -> CachedPrefix:
        """The same with the first `n_pages` pages, more than `start` needs; releases the others."""
        rest = found.pages[n_pages:]
        self.pool.release(rest, [0] * len(self.pool.windows))
        fresh = []
        for window, pages in zip(self.pool.windows, found.fresh, strict=True):
            for page in pages:
                if page in rest:
                    window.forget(page)
            fresh.append([page for page in pages if page not in rest])
        n_shared = min(found.n_shared, n_pages)
        return dataclasses.replace(
            found, pages=found.pages[:n_pages], n_shared=n_shared, fresh=tuple(fresh)
        )

    def prefill(
        self,
        tokens: np.ndarray,
        found: CachedPrefix,
        work: PrefillWork,
        adapter: int,
        *,
        snapshot_at_end: bool = True,
    ) -> None:
        """Adds the prefill of the tokens that are not found to the work."""
        page_len = self.pool.page_len
        work.written_pages.update(*found.fresh)
        if found.n_found < len(tokens):
            work.written_pages.update(
                found.pages[found.n_cached // page_len : self.pool.pages_for(len(tokens))]
            )
            self.pool.add_prefix(tokens, found.pages, adapter)
        if self.states is None:
            self._add_rows(tokens, found.start, found, work, adapter)
        else:
            self._prefill_from_state(tokens, found, work, adapter, snapshot_at_end)

    def _prefill_from_state(
        self,
        tokens: np.ndarray,
        found: CachedPrefix,
        work: PrefillWork,
        adapter: int,
        snapshot_at_end: bool,
    ) -> None:
        """The rows from the state that was found to the sequence's own, by way of snapshots."""
        source, start, state = found.source, found.start, found.state
        border = found.n_shared * self.pool.page_len
        if start < border < len(tokens):
            # Another prefix has the pages until here: more may follow.
            snapshot = self._snapshot_slot(work)
            target = snapshot or state
            self._add_rows(tokens[:border], start, found, work, adapter, source, target)
            if snapshot:
                self.keep_state(snapshot, tokens[:border], found.pages, adapter, work)
            source, start = target, border
        if start < len(tokens):
            snapshot = self._snapshot_slot(work) if snapshot_at_end else 0
            self._add_rows(tokens, start, found, work, adapter, source, snapshot or state)
            if snapshot:
                self.keep_state(snapshot, tokens, found.pages, adapter, work)
            source = snapshot or state
        if source != state:
            late = source in work.written_states
            copies = work.post_prefill_state_copies if late else work.state_copies
            copies.append((source, state))

    def _add_rows(
        self,
        tokens: np.ndarray,
        start: int,
        found: CachedPrefix,
        work: PrefillWork,
        adapter: int,
        source: int = ZERO,
        target: int = ZERO,
    ) -> None:
        """Adds the tokens from `start` on to the work."""
        if start < len(tokens):
            tables = self._tables(found)
            axes = None if self.images is None else self.images.axis_positions(tokens)
            ahead = None if self.images is None else self.images.ahead(tokens)
            places = (None if found is None else found[start:] for found in (axes, ahead))
            chunk = PrefillChunk(tokens[start:], start, tables, adapter, source, target, *places)
            work.chunks.append(chunk)
            work.row_budget -= self._n_rows(len(tokens) - start)
            assert work.row_budget >= 0, "prefill exceeds the row budget of its dispatch"

    def _tables(self, found: CachedPrefix) -> dict[int, list[int]]:
        """The page tables of prefill, which writes to no page that is shared."""
        tables = self.pool.tables(found.pages, found.first)
        for table, fresh in zip(tables.values(), ([], *found.fresh), strict=True):
            for i, page in enumerate(found.pages[: found.n_shared]):
                if table[i] != FREED and page not in fresh:
                    table[i] = read_only(table[i])
        return tables

    def _snapshot_slot(self, work: PrefillWork) -> int:
        """A slot for a snapshot, or 0 if this dispatch uses all."""
        assert self.states is not None
        try:
            return self.states.allocate(work.pinned_states)
        except OutOfPages:
            return 0

    def keep_state(
        self,
        slot: int,
        tokens: np.ndarray,
        pages: list[int],
        adapter: int,
        work: PrefillWork | None,
    ) -> None:
        """Makes the slot the snapshot of the state after these tokens, whose pages are cached.

        `work` is the one that writes it, if there is one.
        """
        assert self.states is not None
        n_full = len(tokens) // self.pool.page_len
        parent = pages[n_full - 1] if n_full else root(adapter)
        if work is not None:
            work.written_states.add(slot)
            work.pinned_states.add(slot)
        self.states.keep(slot, parent, tokens[n_full * self.pool.page_len :].tobytes())


def page_copy(source: Sequence[int], target: Sequence[int]) -> PageCopy:
    """The copy of the device pages of a page to those of another one."""
    return tuple(page for pair in zip(source, target, strict=True) for page in pair)
