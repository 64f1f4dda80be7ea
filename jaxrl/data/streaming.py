"""Items of files larger than memory: rows are read by blocks while the run goes through them.

    blocks of rows, shuffled -> rows -> shuffled in a buffer -> items

The blocks are the row groups of parquet, the record batches of arrow, and 1024 lines of JSONL. Only
the index of the blocks, the blocks of the buffer and the rows of a step are in memory. The
iteration is grain's, whose state is the position; the buffer is read again on resume.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import grain
from grain.experimental import FlatMapIterDataset, FlatMapTransform, WindowShuffleIterDataset

from jaxrl.data.items import ItemMaker, no_items
from jaxrl.data.sources.row_blocks import LazyRow, RowBlock, fingerprints, index_blocks
from jaxrl.data.sources.rows import Dropped

logger = logging.getLogger(__name__)


class ItemStream[T]:
    """The endless items of sources that stay on disk; every epoch has another order with `shuffle`.

    `items` has the items of the first row of each source only. Raises ValueError if the first row
    of a source is invalid, and during iteration for later ones.
    """

    n_solved = 0

    def __init__(
        self,
        sources: Sequence[str],
        maker: ItemMaker[T],
        *,
        first: int = 0,
        shuffle: bool,
        buffer: int,
        seed: int,
    ):
        """`first` is the number of the first row, `buffer` the number of rows shuffled together."""
        blocks = list(index_blocks(sources, first))
        self._n_rows = sum(block.n_rows for block in blocks)
        if not self._n_rows:
            raise ValueError(no_items(sources, maker, Dropped()))
        self._maker, self._files = maker, fingerprints(blocks)
        self.items = first_items(blocks, maker)
        order = grain.MapDataset.source(range(len(blocks))).seed(seed)
        order = (order.shuffle() if shuffle else order).repeat()
        read = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        rows = FlatMapIterDataset(order.to_iter_dataset(read), _Rows(blocks))
        if shuffle:
            rows = WindowShuffleIterDataset(rows, window_size=buffer, seed=seed)
        items = FlatMapIterDataset(rows, _Items(maker, sources, self._n_rows))
        self._iterator = iter(items)

    def __len__(self) -> int:
        """Number of rows, including those that are too long."""
        return self._n_rows

    def mark_solved(self, ids: Iterable[int]) -> None:
        """No effect: streamed prompts are not skipped."""

    def take(self, n: int) -> list[T]:
        """The next n items."""
        return [next(self._iterator) for _ in range(n)]

    def state(self) -> dict[str, Any]:
        return {"files": self._files, "position": self._iterator.get_state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues after the item before which `state` was taken. Raises ValueError."""
        if self._files != list(state["files"]):
            changed = [file for file in self._files if file not in state["files"]]
            names = ", ".join(file.rpartition(" ")[0] for file in changed[:5]) or "fewer, or others"
            raise ValueError(
                f"the streamed files are not those of the checkpoint ({names}); resume with the "
                "same files, or start in a new run_dir"
            )
        self._iterator.set_state(state["position"])


def first_items[T](blocks: Sequence[RowBlock], maker: ItemMaker[T]) -> list[T]:
    """The items of the first row of each source, which show its columns and the chat template."""
    firsts = {block.source: block for block in reversed(blocks)}
    rows = [firsts[source].rows()[0].read(maker.columns) for source in sorted(firsts)]
    items = [item for row in rows for item in maker.make([row], Dropped())]
    maker.usage.add(rows)
    maker.usage.log(maker.kind)
    return items


class _Rows(FlatMapTransform):
    """The rows of a block, not decoded yet."""

    def __init__(self, blocks: Sequence[RowBlock]):
        self._blocks = blocks

    def flat_map(self, element: int) -> Sequence[LazyRow]:
        return self._blocks[element].rows()


class _Items[T](FlatMapTransform):
    """The items of a row: none if it is dropped, several if each turn is a sequence."""

    def __init__(self, maker: ItemMaker[T], sources: Sequence[str], n_rows: int):
        self._maker, self._sources, self._n_rows = maker, sources, n_rows
        self._dropped = Dropped()  # since the last item
        self._n_errors = 0

    def flat_map(self, element: LazyRow) -> Sequence[T]:
        n = len(self._dropped.errors)
        items = self._maker.make([element.read(self._maker.columns)], self._dropped)
        for error in self._dropped.errors[n:]:
            self._n_errors += 1
            logger.warning("a row was dropped (%d so far): %s", self._n_errors, error)
        if items:
            self._dropped = Dropped()
        elif len(self._dropped) > 2 * self._n_rows:
            raise ValueError(no_items(self._sources, self._maker, self._dropped))
        return items
