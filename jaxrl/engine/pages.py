"""Host-side bookkeeping of KV pages: reference counts, and the prefix tree for prefix caching."""

import bisect
import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from jaxrl.engine.windows import WindowPages

ROOT = -1  # parent of the first page of a sequence of the base model
FREED = -1  # in a page table: no page; kernels read any in its place, and mask what they read


class OutOfPages(RuntimeError):
    """Raised if an allocation needs more pages than are free."""


@dataclasses.dataclass(frozen=True)
class PrefixMatch:
    """Cached pages that hold the KV of the first tokens of a sequence."""

    pages: list[int]  # full pages, to be shared
    partial: int = ROOT  # page whose first `n_partial` tokens come next, to be copied
    n_partial: int = 0


class PrefixTree:
    """Maps token prefixes to the pages that hold their KV.

    A page is the child of the page before it in its sequence, so a node represents all tokens from
    position 0 on. Children are sorted by their tokens: the best match is a neighbour in that order.
    """

    def __init__(self):
        self._children: dict[int, list[tuple[bytes, int]]] = {}  # parent -> sorted (tokens, page)
        self._nodes: dict[int, tuple[int, bytes]] = {}  # page -> (parent, tokens)

    def __contains__(self, page: int) -> bool:
        return page in self._nodes

    def __len__(self) -> int:
        return len(self._nodes)

    def find_child(self, parent: int, tokens: bytes) -> int | None:
        """The child of `parent` whose first tokens are `tokens`."""
        children = self._children.get(parent, [])
        i = bisect.bisect_left(children, (tokens,))
        return children[i][1] if i < len(children) and children[i][0].startswith(tokens) else None

    def best_match(self, parent: int, tokens: bytes) -> tuple[int, int]:
        """The child of `parent` with the longest common prefix, and that prefix's token count."""
        children = self._children.get(parent, [])
        i = bisect.bisect_left(children, (tokens,))
        neighbours = children[max(i - 1, 0) : i + 1]
        matches = [(_n_common(other, tokens), page) for other, page in neighbours]
        n, page = max(matches, default=(0, ROOT))
        return page, n

    def add(self, page: int, parent: int, tokens: bytes) -> None:
        bisect.insort(self._children.setdefault(parent, []), (tokens, page))
        self._nodes[page] = parent, tokens

    def remove(self, page: int) -> None:
        assert page not in self._children, f"page {page} still has children"
        parent, tokens = self._nodes.pop(page)
        children = self._children[parent]
        del children[bisect.bisect_left(children, (tokens, page))]
        if not children:
            del self._children[parent]


class PagePool:
    """Reference-counted pages 0..n_pages-1, and the prefix tree over the pages with known tokens.

    Only one sequence writes to a page. Others may read its first tokens: a full page found in the
    tree is shared; a partly matching page is copied, because the reader writes after the match.
    With `keep`, an unreferenced page stays in the tree until it is evicted in LRU order.

    A sequence that references a page also references all its ancestors, and releases run from the
    last page to the first. So a page is always released before its ancestors: the least recently
    used page is a leaf, and can be evicted.

    Layers that see all tokens have a device page of the same number for every page. The layers of
    one of `windows` have device pages only for the pages that a sequence still sees: those from the
    index `first[w]` on.
    """

    def __init__(
        self, n_pages: int, page_len: int, *, keep: bool = True, windows: Sequence[WindowPages] = ()
    ):
        self.n_pages, self.page_len, self.keep = n_pages, page_len, keep
        self.windows = tuple(windows)
        # Called with every page whose tokens are not known any more.
        self.on_remove: Callable[[int], None] = lambda page: None
        self._empty = list(range(n_pages - 1, -1, -1))  # unreferenced and not in the tree
        self._cached: dict[int, None] = {}  # unreferenced pages in the tree, in LRU order
        self._ref_counts = [0] * n_pages
        self._tree = PrefixTree()

    @property
    def n_free(self) -> int:
        """Pages that `allocate` can return: unreferenced ones, cached ones included."""
        return min([self._n_unreferenced, *(window.n_free for window in self.windows)])

    @property
    def n_used(self) -> int:
        """Referenced pages."""
        return self.n_pages - self._n_unreferenced

    @property
    def utilization(self) -> float:
        """Fraction of the pages in use, of the group of layers where it is largest."""
        windows = (1 - window.n_free / window.n_pages for window in self.windows)
        return max([self.n_used / self.n_pages, *windows])

    @property
    def _n_unreferenced(self) -> int:
        return len(self._empty) + len(self._cached)

    def pages_for(self, n_tokens: int) -> int:
        """Number of pages that `n_tokens` tokens occupy."""
        return -(-n_tokens // self.page_len)

    def allocate(self, n: int) -> list[int]:
        """Returns `n` pages with one reference each, evicting cached pages if needed.

        Raises OutOfPages if fewer are free, and then allocates none.
        """
        if n > self.n_free:
            raise OutOfPages(f"{n} pages requested, {self.n_free} of {self.n_pages} are free")
        while len(self._empty) < n:
            least_recently_used = next(iter(self._cached))
            del self._cached[least_recently_used]
            self._remove(least_recently_used)
            self._make_empty(least_recently_used)
        pages = [self._empty.pop() for _ in range(n)]
        for page in pages:
            self._ref_counts[page] = 1
        for window in self.windows:
            window.reference(pages)
        return pages

    def share(self, pages: Sequence[int], first: Sequence[int] = ()) -> list[int]:
        """Adds a reference to each of these pages, which must be referenced or cached."""
        self._share(pages)
        for window, i in zip(self.windows, first, strict=True):
            window.reference(pages[i:])
        return list(pages)

    def take(self, shared: Sequence[int], n_new: int, first: Sequence[int] = ()) -> list[int]:
        """`share` and `allocate` together. Raises OutOfPages and then changes nothing."""
        n_cached = sum(page in self._cached for page in shared)
        free = [self._n_unreferenced - n_cached]
        for window, i in zip(self.windows, first, strict=True):
            free.append(window.n_free - window.n_taken(shared[i:]))
        if min(free) < n_new:
            raise OutOfPages(f"{n_new} pages requested, {free} are free in the groups of layers")
        return self.share(shared, first) + self.allocate(n_new)

    def release(self, pages: Sequence[int], first: Sequence[int] | None = None) -> None:
        """Drops one reference to each of these pages, given in the order of their sequence.

        Without `first`, those to device pages have been dropped before.
        """
        if first is not None:
            self.release_windows(pages, first)
        for page in reversed(pages):
            assert self._ref_counts[page] > 0, f"page {page} is free already"
            self._ref_counts[page] -= 1
            if self._ref_counts[page] == 0:
                in_tree = page in self._tree
                if in_tree and self.keep:
                    self._cached[page] = None
                else:
                    if in_tree:
                        self._remove(page)
                    self._make_empty(page)

    def release_windows(self, pages: Sequence[int], first: Sequence[int]) -> None:
        """Drops the references of a sequence to its device pages."""
        for window, i in zip(self.windows, first, strict=True):
            window.release(pages[i:])

    def slide(self, pages: Sequence[int], first: Sequence[int], n_tokens: int) -> tuple[int, ...]:
        """Releases the device pages that no token after `n_tokens` sees. Returns the new `first`.

        Those of pages in the prefix tree stay cached.
        """
        moved = []
        for window, i in zip(self.windows, first, strict=True):
            moved.append(max(window.first(n_tokens), i))
            passed = pages[i : moved[-1]]
            window.release(passed)
            for page in passed:
                if page not in self._tree:
                    window.forget(page)
        return tuple(moved)

    def n_visible(self, pages: list[int]) -> int:
        """The longest prefix of these pages whose next token finds all device pages it sees."""
        return next(n for n in range(len(pages), -1, -1) if self.visible(pages[:n]))

    def visible(self, pages: list[int], n_tokens: int | None = None) -> bool:
        """Whether the token after these pages, or `n_tokens`, finds all device pages it sees."""
        n = len(pages) * self.page_len if n_tokens is None else n_tokens
        return not any(window.missing(pages[window.first(n) :]) for window in self.windows)

    def device_pages(self, page: int) -> tuple[int, ...]:
        """The device pages of a page, all of which it has: without a window, then by window."""
        return (page, *(window.device_page(page) for window in self.windows))

    def tables(
        self, pages: Sequence[int], first: Sequence[int], start: int = 0
    ) -> dict[int, list[int]]:
        """The device pages of a sequence by window; 0 is that of the layers without one.

        Those from the index `start` on. FREED is in the place of pages that no sequence sees.
        """
        found = {0: list(pages[start:])}
        for window, i in zip(self.windows, first, strict=True):
            seen = [window.device_page(p) for p in pages[max(i, start) :]]
            found[window.window] = [FREED] * (i - start) + seen
        return found

    def add_prefix(self, tokens: np.ndarray, pages: Sequence[int], adapter: int = 0) -> list[int]:
        """Adds the pages that hold the KV of int32 `tokens`, from position 0 on, to the tree.

        The KV of one adapter is no match for another one or for the base model, 0.

        Returns the pages that the sequence uses from now on: a duplicate of a page that is already
        in the tree is released, and the cached page takes its place.
        """
        pages, parent = list(pages), root(adapter)
        for i, page_tokens in enumerate(self._page_tokens(tokens)):
            page, same = pages[i], self._tree.find_child(parent, page_tokens)
            if same is None:
                if page in self._tree:  # with fewer of these tokens
                    self._remove(page)
                self._tree.add(page, parent, page_tokens)
            elif same != page:
                if page in self._tree:
                    self._remove(page)
                if len(page_tokens) == self.page_len * ITEM:
                    for window in self.windows:
                        window.move(page, same)
                self._share([same])
                pages[i] = same
                self.release([page])
            parent = pages[i]
        return pages

    def match_prefix(self, tokens: np.ndarray, adapter: int = 0) -> PrefixMatch:
        """The pages in the tree that hold the longest prefix of these tokens with the adapter."""
        pages, parent = [], root(adapter)
        for page_tokens in self._page_tokens(tokens):
            page, n = self._tree.best_match(parent, page_tokens)
            if n < self.page_len:
                return PrefixMatch(pages, page, n) if n else PrefixMatch(pages)
            pages.append(page)
            parent = page
        return PrefixMatch(pages)

    def reset_prefix_cache(self) -> None:
        """Empties the tree; cached pages become empty."""
        self._tree = PrefixTree()
        self._empty += self._cached
        self._cached.clear()
        for window in self.windows:
            window.reset()

    def _share(self, pages: Sequence[int]) -> None:
        for page in pages:
            assert self._ref_counts[page] > 0 or page in self._cached, f"page {page} is free"
            self._cached.pop(page, None)
            self._ref_counts[page] += 1

    def _make_empty(self, page: int) -> None:
        self._empty.append(page)
        for window in self.windows:
            window.forget(page)

    def _remove(self, page: int) -> None:
        self._tree.remove(page)
        self.on_remove(page)

    def _page_tokens(self, tokens: np.ndarray) -> list[bytes]:
        """The tokens of each page as bytes; the last page may have fewer."""
        whole = np.asarray(tokens, np.int32).tobytes()
        n = self.page_len * ITEM
        return [whole[i : i + n] for i in range(0, len(whole), n)]


ITEM = np.dtype(np.int32).itemsize


def root(adapter: int) -> int:
    """The parent of the first page of a sequence that uses this adapter."""
    return ROOT - adapter


def read_only(page: int) -> int:
    """The entry of a page table by which prefill reads a page and writes nothing to it."""
    return FREED - 1 - page


def _n_common(a: bytes, b: bytes) -> int:
    """Number of leading tokens that two pages have in common."""
    n = min(len(a), len(b)) // ITEM
    differ = np.frombuffer(a, np.int32, n) != np.frombuffer(b, np.int32, n)
    return int(np.argmax(differ)) if differ.any() else n
