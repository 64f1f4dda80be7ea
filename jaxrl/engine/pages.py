"""The pages of the KV pool, on the host: who holds which, and which hold the keys of which tokens."""

import bisect
import dataclasses
from collections.abc import Sequence

import numpy as np

ROOT = -1  # stands before the first page of every sequence


class OutOfPages(RuntimeError):
    """More pages were asked for than are free."""


@dataclasses.dataclass(frozen=True)
class Found:
    """Pages that hold the keys of the first tokens of a sequence."""

    pages: list[int]  # full ones, to be shared
    tail: int = ROOT  # one whose first `n_tail` keys are the next ones, to be copied
    n_tail: int = 0


class PrefixTree:
    """Which pages hold the keys of which tokens.

    A page lies below the page before it, so it stands for all tokens from position 0 on. Pages below
    the same one are sorted by their tokens: what begins most alike is a neighbour.
    """

    def __init__(self):
        self._below: dict[int, list[tuple[bytes, int]]] = {}  # sorted (tokens, page)
        self._place: dict[int, tuple[int, bytes]] = {}  # page -> (page before it, tokens)

    def __contains__(self, page: int) -> bool:
        return page in self._place

    def __len__(self) -> int:
        return len(self._place)

    def starting_with(self, before: int, tokens: bytes) -> int | None:
        """A page behind `before` whose first keys are those of `tokens`."""
        below = self._below.get(before, [])
        i = bisect.bisect_left(below, (tokens,))
        return below[i][1] if i < len(below) and below[i][0].startswith(tokens) else None

    def most_alike(self, before: int, tokens: bytes) -> tuple[int, int]:
        """The page behind `before` with the most keys in common with `tokens`, and their number."""
        below = self._below.get(before, [])
        i = bisect.bisect_left(below, (tokens,))
        alike = [(_n_common(other, tokens), page) for other, page in below[max(i - 1, 0) : i + 1]]
        n, page = max(alike, default=(0, ROOT))
        return page, n

    def add(self, page: int, before: int, tokens: bytes) -> None:
        bisect.insort(self._below.setdefault(before, []), (tokens, page))
        self._place[page] = before, tokens

    def remove(self, page: int) -> None:
        assert page not in self._below, f"pages lie behind page {page}"
        before, tokens = self._place.pop(page)
        below = self._below[before]
        del below[bisect.bisect_left(below, (tokens, page))]
        if not below:
            del self._below[before]


class PagePool:
    """Reference-counted pages 0..n_pages-1, and the prefix tree of those whose tokens are known.

    A page is written by one sequence only. Others may read its first keys: a page found in the tree
    is shared where it is full, and copied where the reader has to write behind them. With `keep` a
    page without a holder stays in the tree until its room is needed, the longest unused first.

    Who holds a page of the tree holds all pages before it, and holds end from the last page to the
    first. So behind a page in the order of last use there is never one that lies before it in the tree:
    the longest unused page has none behind it, and can go.
    """

    def __init__(self, n_pages: int, page_len: int, *, keep: bool = True):
        self.n_pages, self.page_len, self.keep = n_pages, page_len, keep
        self._empty = list(range(n_pages - 1, -1, -1))  # neither held nor kept
        self._kept: dict[int, None] = {}  # in the tree without a holder, the longest unused first
        self._holders = [0] * n_pages
        self._tree = PrefixTree()

    @property
    def n_free(self) -> int:
        """Pages without a holder: those that `take` may take."""
        return len(self._empty) + len(self._kept)

    @property
    def n_used(self) -> int:
        return self.n_pages - self.n_free

    def pages_of(self, n_tokens: int) -> int:
        """Pages that `n_tokens` tokens occupy."""
        return -(-n_tokens // self.page_len)

    def holders(self, page: int) -> int:
        return self._holders[page]

    def take(self, n: int) -> list[int]:
        """`n` pages, held once each. Raises OutOfPages, taking none, where fewer are free."""
        if n > self.n_free:
            raise OutOfPages(f"{n} pages asked for, {self.n_free} of {self.n_pages} are free")
        while len(self._empty) < n:
            longest_unused = next(iter(self._kept))
            del self._kept[longest_unused]
            self._tree.remove(longest_unused)
            self._empty.append(longest_unused)
        pages = [self._empty.pop() for _ in range(n)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def share(self, pages: Sequence[int]) -> list[int]:
        """Holds pages that are held or kept once more."""
        for page in pages:
            assert self._holders[page] > 0 or page in self._kept, f"page {page} is free"
            self._kept.pop(page, None)
            self._holders[page] += 1
        return list(pages)

    def give_back(self, pages: Sequence[int]) -> None:
        """Ends one hold of each of these pages, which follow each other in a sequence."""
        for page in reversed(pages):
            assert self._holders[page] > 0, f"page {page} is free already"
            self._holders[page] -= 1
            if self._holders[page] == 0:
                known = page in self._tree
                if known and self.keep:
                    self._kept[page] = None
                else:
                    if known:
                        self._tree.remove(page)
                    self._empty.append(page)

    def remember(self, tokens: np.ndarray, pages: Sequence[int]) -> list[int]:
        """Makes the pages that hold the keys of int32 `tokens`, from position 0 on, known to `find`.

        Returns the pages of the sequence from now on: a page that another one makes needless is given
        back for it.
        """
        pages, before = list(pages), ROOT
        for i, known in enumerate(self._page_tokens(tokens)):
            page, same = pages[i], self._tree.starting_with(before, known)
            if same is None:
                if page in self._tree:  # with the first of these tokens
                    self._tree.remove(page)
                self._tree.add(page, before, known)
            elif same != page:
                if page in self._tree:
                    self._tree.remove(page)
                pages[i : i + 1] = self.share([same])
                self.give_back([page])
            before = pages[i]
        return pages

    def find(self, tokens: np.ndarray) -> Found:
        """The known pages that hold the first of these tokens."""
        pages, before = [], ROOT
        for wanted in self._page_tokens(tokens):
            page, n = self._tree.most_alike(before, wanted)
            if n < self.page_len:
                return Found(pages, page, n) if n else Found(pages)
            pages.append(page)
            before = page
        return Found(pages)

    def forget(self) -> None:
        """Makes all pages unknown: the kept ones become empty."""
        self._tree = PrefixTree()
        self._empty += self._kept
        self._kept.clear()

    def _page_tokens(self, tokens: np.ndarray) -> list[bytes]:
        """The tokens of each page, as bytes; those of the last page may be fewer."""
        whole = np.asarray(tokens, np.int32).tobytes()
        n = self.page_len * ITEM
        return [whole[i : i + n] for i in range(0, len(whole), n)]


ITEM = np.dtype(np.int32).itemsize


def _n_common(a: bytes, b: bytes) -> int:
    """Tokens in which two pages begin alike."""
    n = min(len(a), len(b)) // ITEM
    differ = np.frombuffer(a, np.int32, n) != np.frombuffer(b, np.int32, n)
    return int(np.argmax(differ)) if differ.any() else n
