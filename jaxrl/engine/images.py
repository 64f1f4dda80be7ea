"""Images of requests: the numbers of their tokens on the host, and the features of these tokens.

In place of the placeholder tokens of an image a sequence has the numbers -1 - row, where the rows
of a table belong to the features of images:

    request      5  9  <image> <image> <image>  7        two images of equal content have the same
    sequence     5  9    -1      -2      -3     7        rows, so they share pages of KV

So the prefix cache, chunks of prefill, preemption and the copies of pages treat images as text.
"""

import bisect
import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from jaxtyping import Int32

from jaxrl.engine.api import Request, RequestImage
from jaxrl.types import Grid

MAX_ROWS = 2**31 - 1  # numbers of tokens are int32


@dataclasses.dataclass(frozen=True)
class ImageSettings:
    """The images that a model reads."""

    token: int  # the placeholder
    D: int  # features of a token
    n_deep: int  # layers after which more features are added to the hidden states
    merge: int  # patches on each side of a token, for positions by axis; 0: one position each
    dtype: np.dtype  # of the features
    whole: bool = False  # the tokens of an image see each other, so one call has all of them

    def delta(self, images: Sequence[RequestImage]) -> int:
        """Position of a token after the images, minus its index (jaxrl/data/images/mrope.py)."""
        if not self.merge:
            return 0
        return sum(max(image.grid[1:]) // self.merge - len(image.rows) for image in images)


@dataclasses.dataclass
class _Entry:
    """An image of the table."""

    first: int  # row of its first token
    n: int  # tokens
    grid: Grid
    n_uses: int = 0  # sequences with it
    features: RequestImage | None = None  # None while no sequence has it


class ImageTable:
    """The images of the sequences of an engine. A row is given to no other image until `forget`."""

    def __init__(self, settings: ImageSettings, max_len: int = MAX_ROWS):
        """`max_len` are the tokens of a call of prefill."""
        self.settings, self._max_len = settings, max_len
        self._entries: dict[str, _Entry] = {}  # by digest
        self._in_order: list[_Entry] = []
        self._starts: list[int] = []  # their first rows
        self._n_rows = 0
        self._held: dict[int, tuple[RequestImage, ...]] = {}  # by slot

    def submit(self, request: Request, submit: Callable[[Request], int]) -> int:
        """Submits the request with the numbers of its images. Returns the slot.

        Raises ValueError if its tokens and images contradict each other.
        """
        self.check(request)
        slot = submit(self._numbered(request))
        if request.images:
            self._held[slot] = request.images
            for image in request.images:
                entry = self._entries[image.digest]
                entry.n_uses, entry.features = entry.n_uses + 1, image
        return slot

    def remove(self, slot: int) -> None:
        """Drops the features that no slot but this one needs."""
        for image in self._held.pop(slot, ()):
            entry = self._entries[image.digest]
            entry.n_uses -= 1
            if not entry.n_uses:
                entry.features = None

    def forget(self) -> None:
        """Drops the rows of all images, unless a sequence has one. No page may have their KV."""
        if not self._held:
            self._entries, self._in_order, self._starts, self._n_rows = {}, [], [], 0

    def clear(self) -> None:
        for slot in list(self._held):
            self.remove(slot)

    def _numbered(self, request: Request) -> Request:
        tokens = np.array(request.tokens, np.int32)
        for image in request.images:
            entry = self._entry(image)
            tokens[image.start : image.start + entry.n] = -1 - entry.first - np.arange(entry.n)
        return dataclasses.replace(request, tokens=tokens)

    def check(self, request: Request) -> None:
        """Raises ValueError if the placeholders of a request are not those of its images."""
        of_images = np.zeros(len(request.tokens), bool)
        for i, image in enumerate(request.images):
            n, D = image.rows.shape
            n_deep = 0 if image.deep is None else image.deep.shape[1]
            if (D, n_deep) != (self.settings.D, self.settings.n_deep):
                raise ValueError(
                    f"image {i} of a request has {D} features per token and {n_deep} of deepstack; "
                    f"the model has {self.settings.D} and {self.settings.n_deep}"
                )
            of_images[image.start : image.start + n] = True
        n_tokens = sum(len(image.rows) for image in request.images)
        placeholders = np.asarray(request.tokens) == self.settings.token
        if n_tokens != of_images.sum() or not np.array_equal(of_images, placeholders):
            raise ValueError(
                f"a request has {int(placeholders.sum())} tokens of images "
                f"({self.settings.token}) and {len(request.images)} images with {n_tokens}, not in "
                "their places; expand each image to its number of tokens"
            )
        if self.settings.whole:
            self._check_whole(request)
        if placeholders[-1:].any():
            raise ValueError("a prompt ends with an image; add the tokens that ask for a response")

    def _check_whole(self, request: Request) -> None:
        """Raises ValueError for images that one call cannot have, or that would be seen as one."""
        end = -1
        for i, image in enumerate(request.images):
            if len(image.rows) > self._max_len:
                raise ValueError(
                    f"image {i} of a request has {len(image.rows)} tokens, which see each other, "
                    f"and a call of prefill has at most {self._max_len}; raise "
                    "config.rollout.max_num_batched_tokens"
                )
            if image.start == end:
                raise ValueError(
                    f"images {i - 1} and {i} of a request have no token between them, so their "
                    "tokens would see each other; put text between them"
                )
            end = image.start + len(image.rows)

    def ahead(self, tokens: Int32[np.ndarray, " T"]) -> Int32[np.ndarray, " T"] | None:
        """The last position that each token of a sequence sees; None: its own.

        Sequences end after an image, never within one.
        """
        if not self.settings.whole:
            return None
        found = np.arange(len(tokens), dtype=np.int32)
        for _, begin, end in _runs((tokens < 0)[None]):
            found[begin:end] = end - 1
        return found

    def axis_positions(self, tokens: Int32[np.ndarray, " T"]) -> Int32[np.ndarray, "T 3"] | None:
        """Positions by axis of the first tokens of a sequence; None if they are those of text."""
        merge, begins = self.settings.merge, np.flatnonzero(tokens < 0)
        if not merge or not len(begins):
            return None
        parts, start, position = [], 0, 0
        while start < len(tokens):
            ahead = begins[np.searchsorted(begins, start) :]
            begin = int(ahead[0]) if len(ahead) else len(tokens)
            parts.append(np.repeat(position + np.arange(begin - start)[:, None], 3, axis=1))
            position, start = position + begin - start, begin
            if begin < len(tokens):
                entry = self._at(-1 - int(tokens[begin]))
                frames, height, width = entry.grid
                sizes = frames, height // merge, width // merge
                parts.append(np.indices(sizes).reshape(3, -1).T[: len(tokens) - begin] + position)
                position, start = position + max(sizes[1:]), begin + entry.n
        return np.concatenate(parts).astype(np.int32)

    def features(self, tokens: Int32[np.ndarray, "R T"]) -> tuple[np.ndarray, np.ndarray | None]:
        """([R, T, D], [R, T, n_deep, D] or None): the features of tokens, zeros for text."""
        shape, settings = tokens.shape, self.settings
        rows = np.zeros((*shape, settings.D), settings.dtype)
        deep = np.zeros((*shape, settings.n_deep, settings.D), settings.dtype)
        for b, begin, end in _runs(tokens < 0):
            while begin < end:
                row = -1 - int(tokens[b, begin])
                entry = self._at(row)
                assert entry.features is not None, "a sequence has the image"
                offset = row - entry.first
                n = min(end - begin, entry.n - offset)
                rows[b, begin : begin + n] = entry.features.rows[offset : offset + n]
                if entry.features.deep is not None:
                    deep[b, begin : begin + n] = entry.features.deep[offset : offset + n]
                begin += n
        return rows, deep if settings.n_deep else None

    def _entry(self, image: RequestImage) -> _Entry:
        """The entry of an image, a new one with the next rows if its content is new."""
        if image.digest not in self._entries:
            if self._n_rows + len(image.rows) > MAX_ROWS:
                raise ValueError(
                    f"the engine has read {len(self._entries)} different images with its weights, "
                    "and has no numbers for the tokens of more; start it again"
                )
            entry = _Entry(self._n_rows, len(image.rows), image.grid)
            self._entries[image.digest] = entry
            self._in_order.append(entry)
            self._starts.append(entry.first)
            self._n_rows += entry.n
        return self._entries[image.digest]

    def _at(self, row: int) -> _Entry:
        return self._in_order[bisect.bisect_right(self._starts, row) - 1]


def _runs(marked: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """(row, begin, end) of each run of True in the rows of bool [R, T]."""
    edges = np.diff(np.pad(marked, ((0, 0), (1, 1))).astype(np.int8), axis=1)
    begins, ends = np.argwhere(edges == 1), np.argwhere(edges == -1)
    for (row, begin), (_, end) in zip(begins.tolist(), ends.tolist(), strict=True):
        yield row, begin, end
