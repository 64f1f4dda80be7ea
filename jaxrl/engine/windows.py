"""Host-side bookkeeping of the device pages of layers with a window."""

from collections.abc import Sequence


class WindowPages:
    """Device pages 0..n_pages-1 of the layers with one window, for the pages of a `PagePool`.

    A page has a device page while a sequence may still see it. After that its device page stays
    cached, and is evicted in LRU order or when the page leaves the prefix tree.
    """

    def __init__(self, n_pages: int, page_len: int, window: int):
        self.n_pages, self.page_len, self.window = n_pages, page_len, window
        self._empty = list(range(n_pages - 1, -1, -1))
        self._device: dict[int, int] = {}  # page -> device page
        self._ref_counts: dict[int, int] = {}  # of the pages that sequences see
        self._cached: dict[int, None] = {}  # pages that none sees, in LRU order

    @property
    def n_free(self) -> int:
        """Device pages that no sequence sees, cached ones included."""
        return len(self._empty) + len(self._cached)

    def first(self, n_tokens: int) -> int:
        """The index of the first page that the token after `n_tokens` tokens sees."""
        return max(n_tokens - self.window + 1, 0) // self.page_len

    def device_page(self, page: int) -> int:
        """The device page of a page that has one."""
        return self._device[page]

    def missing(self, pages: Sequence[int]) -> list[int]:
        """Those of the pages that have no device page."""
        return [page for page in pages if page not in self._device]

    def n_taken(self, pages: Sequence[int]) -> int:
        """Free device pages that `reference` of these pages takes."""
        return sum(page not in self._ref_counts for page in pages)

    def reference(self, pages: Sequence[int]) -> None:
        """Adds a reference to each of these pages; those without a device page get one."""
        assert self.n_taken(pages) <= self.n_free, f"{len(pages)} pages, {self.n_free} are free"
        for page in pages:
            self._cached.pop(page, None)
            self._ref_counts[page] = self._ref_counts.get(page, 0) + 1
        for page in self.missing(pages):
            if not self._empty:
                self.forget(next(iter(self._cached)))
            self._device[page] = self._empty.pop()

    def release(self, pages: Sequence[int]) -> None:
        """Drops one reference to each of these pages; unreferenced ones stay cached."""
        for page in pages:
            self._ref_counts[page] -= 1
            if self._ref_counts[page] == 0:
                del self._ref_counts[page]
                self._cached[page] = None

    def move(self, page: int, other: int) -> None:
        """Gives a cached device page to another page with the same tokens that has none."""
        if page in self._cached and other not in self._device:
            del self._cached[page]
            self._device[other] = self._device.pop(page)
            self._cached[other] = None

    def forget(self, page: int) -> None:
        """Empties the device page of a page that no sequence sees; that of others stays."""
        if page in self._cached:
            del self._cached[page]
            self._empty.append(self._device.pop(page))

    def reset(self) -> None:
        """Empties all cached device pages."""
        for page in list(self._cached):
            self.forget(page)
