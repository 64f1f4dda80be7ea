"""Items of a dataset: prompts, demonstrations or pairs, made from the rows of its sources."""

import dataclasses
import itertools
import logging
from collections.abc import Callable, Iterable, Sequence

from jaxrl.data.sources.rows import SourceRow, number_rows
from jaxrl.data.usage import Usage

_CHUNK = 1024  # rows rendered together

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class ItemMaker[T]:
    """Makes the items of rows, and drops those that are too long."""

    kind: str  # "prompts", for messages
    max_len: str  # the limit of the length with its keys, for messages
    columns: tuple[str, ...]  # data.columns
    make: Callable[[Sequence[SourceRow], list[int]], list[T]]  # adds the lengths of what it drops
    usage: Usage = dataclasses.field(default_factory=Usage)  # of the columns of all rows


def load_items[T](sources: Sequence[str], maker: ItemMaker[T], *, max_rows: int = 0) -> list[T]:
    """All items of the sources in order.

    With `max_rows` the items of that many rows at most, evenly spaced over all rows. Raises
    ValueError if no item remains, and the errors of the sources and of the maker.
    """
    rows = number_rows(sources, maker.columns)
    if max_rows:
        rows = iter(evenly_spaced(list(rows), max_rows))
    return _make_items(rows, maker, sources)


def load_sources[T](sources: Sequence[str], maker: ItemMaker[T]) -> list[list[T]]:
    """The items of each source; otherwise as load_items."""
    found: dict[int, list[T]] = {}
    rows = number_rows(sources, maker.columns)
    for i, group in itertools.groupby(rows, key=lambda row: row.source):
        found[i] = _make_items(group, maker, sources[i : i + 1])
    if empty := [source for i, source in enumerate(sources) if i not in found]:
        raise ValueError(no_items(empty, maker, []))
    return list(found.values())


def _make_items[T](
    rows: Iterable[SourceRow], maker: ItemMaker[T], sources: Sequence[str]
) -> list[T]:
    items: list[T] = []
    dropped: list[int] = []  # lengths
    for chunk in itertools.batched(rows, _CHUNK):
        items += maker.make(chunk, dropped)
        maker.usage.add(chunk)
    maker.usage.log(maker.kind)
    if dropped and items:
        logger.warning(
            "%d of %d %s are longer than %s tokens and were dropped",
            *(len(dropped), len(dropped) + len(items), maker.kind, maker.max_len),
        )
    if not items:
        raise ValueError(no_items(sources, maker, dropped))
    return items


def no_items(sources: Sequence[str], maker: ItemMaker, dropped: Sequence[int]) -> str:
    """The error message for sources without items; `dropped` has the lengths of those too long."""
    names = ", ".join(sources) or "an empty list of sources"
    if not dropped:
        return f"no {maker.kind} in {names}; set data.train (or data.val) to files that have some"
    return (
        f"all {len(dropped)} {maker.kind} of {names} are longer than {maker.max_len} tokens (the "
        f"shortest has {min(dropped)}); raise it"
    )


def evenly_spaced[T](items: Sequence[T], n: int) -> Sequence[T]:
    """At most n of the items, in order and equally far apart, from the first one on."""
    if n >= len(items):
        return items
    return [items[i * len(items) // n] for i in range(n)]
