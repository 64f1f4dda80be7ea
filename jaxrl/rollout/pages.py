"""The pages of the KV pool, on the host: who holds which, and which hold the same tokens."""

from collections.abc import Sequence

import numpy as np


class OutOfPages(RuntimeError):
    """More pages were asked for than are free."""


class PagePool:
    """Reference-counted pages 0..n_pages-1, and an index of the tokens whose keys they hold.

    A page is written by one sequence only. Others may read its first tokens, so a page found in the
    index is shared where it is full, and copied where the reader would have to write behind them.
    """

    def __init__(self, n_pages: int, page_len: int):
        self.n_pages, self.page_len = n_pages, page_len
        self._free = list(range(n_pages - 1, -1, -1))
        self._holders = [0] * n_pages
        self._index: dict[tuple[int, bytes], int] = {}  # (page before it or -1, tokens) -> page
        self._keys: dict[int, tuple[int, bytes]] = {}

    @property
    def n_free(self) -> int:
        return len(self._free)

    @property
    def n_used(self) -> int:
        return self.n_pages - len(self._free)

    def pages_of(self, n_tokens: int) -> int:
        """Pages that `n_tokens` tokens occupy."""
        return -(-n_tokens // self.page_len)

    def holders(self, page: int) -> int:
        return self._holders[page]

    def take(self, n: int) -> list[int]:
        """`n` free pages, held once each. Raises OutOfPages, taking none, where fewer are free."""
        if n > len(self._free):
            raise OutOfPages(f"{n} pages asked for, {len(self._free)} of {self.n_pages} are free")
        pages = [self._free.pop() for _ in range(n)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def share(self, pages: Sequence[int]) -> list[int]:
        """Holds pages that are in use once more."""
        for page in pages:
            assert self._holders[page] > 0, f"page {page} is free"
            self._holders[page] += 1
        return list(pages)

    def give_back(self, pages: Sequence[int]) -> None:
        """Ends one hold of each page; a page without a holder is free and leaves the index."""
        for page in pages:
            assert self._holders[page] > 0, f"page {page} is free already"
            self._holders[page] -= 1
            if self._holders[page] == 0:
                if page in self._keys:
                    del self._index[self._keys.pop(page)]
                self._free.append(page)

    def remember(self, tokens: np.ndarray, pages: Sequence[int]) -> None:
        """Makes pages that hold the keys of int32 `tokens`, in order, known to `find`."""
        before = -1
        for page, key in zip(pages, self._page_tokens(tokens), strict=False):
            if page not in self._keys and (before, key) not in self._index:
                self._index[before, key], self._keys[page] = page, (before, key)
            before = page

    def find(self, tokens: np.ndarray) -> list[int]:
        """The pages known to hold the first of these tokens; the last of them may be partly filled
        only where together they hold all tokens."""
        found: list[int] = []
        before = -1
        for key in self._page_tokens(tokens):
            page = self._index.get((before, key))
            if page is None:
                break
            found.append(page)
            before = page
        return found

    def _page_tokens(self, tokens: np.ndarray) -> list[bytes]:
        n = self.page_len
        return [tokens[i : i + n].tobytes() for i in range(0, len(tokens), n)]
