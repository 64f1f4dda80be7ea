"""Packs sequences into rows: declared shapes, few micro-batches, balanced data-parallel ranks.

A sequence is prompt + response. It occupies prompt_len + response_len - 1 tokens of a row, because
its last token is only a target. It starts at a multiple of `align`, so its size is that length
rounded up to `align`.

1. Bins. Sequences are placed in order of descending length, each in the first row with room
   (first-fit decreasing: with one row length at most 11/9 of the fewest rows). If no row has room,
   a new micro-batch opens: the smallest allowed row length T that holds the sequence, with the most
   rows that any shape of that length has. Then each micro-batch shrinks to the smallest shape that
   holds its sequences. The plan is computed with all row lengths allowed, then without the
   smallest, and so on. The best plan has the fewest tokens including padding, plus one eighth of
   the largest shape per micro-batch for its fixed cost. Ties go to the smaller attention area, the
   sum of T * T over rows.
2. Balance. The ranks wait for each other in every micro-batch, so its sequences are reassigned to
   its rows: in order of descending cost, each goes to the rank with the lowest cost so far that has
   a row with room (longest-processing-time rule). If the last sequences then find no room, whole
   rows of step 1 are assigned by the same rule instead, which always fits.

The cost of a sequence of n tokens is n * linear_cost + n * n: matrix products and causal attention.
Per layer and token they take 24 D² and 2 n D operations, so linear_cost = 12 D. The default is that
of D = 2048, the value in verl's `calculate_workload`.

Packing is deterministic: equal inputs give equal packings.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int, Shaped

from jaxrl.config.keys import LearnerConfig
from jaxrl.data.support import pack_sets
from jaxrl.types import Batch, TrainingSample


@dataclasses.dataclass(frozen=True)
class Span:
    """Location of a response: its token k is the target at [row, start + k], k < length."""

    item: int  # index in the list of samples
    row: int
    start: int
    length: int


@dataclasses.dataclass(frozen=True)
class Packed:
    """One micro-batch.

    Rows [r * B / n_ranks, (r + 1) * B / n_ranks) belong to data-parallel rank r.
    """

    batch: Batch  # numpy arrays [B, T]; old_logp and ref_logp are zero
    spans: tuple[Span, ...]

    @property
    def padding_fraction(self) -> float:
        """Fraction of the B * T tokens that is padding."""
        return float(np.mean(self.batch.segments == 0))


def sequence_lens(batch: Batch) -> Int[np.ndarray, "S"]:
    """Number of tokens of each sequence in a packed batch."""
    segments = np.asarray(batch.segments)
    after = np.pad(segments[:, 1:], ((0, 0), (0, 1)))
    return np.asarray(batch.positions)[(segments != 0) & (segments != after)] + 1


Shape = tuple[int, int]  # (rows per data-parallel rank, tokens of a row)


@dataclasses.dataclass
class _Plan:
    """The shapes of the micro-batches, and the micro-batch and row of each item."""

    shape: list[Shape]  # per micro-batch
    micro_of: np.ndarray  # int [n_items]
    row_of: np.ndarray  # int [n_items], row within the micro-batch, over all ranks

    def tokens(self) -> int:
        return sum(rows * T for rows, T in self.shape)

    def area(self) -> int:
        return sum(rows * T * T for rows, T in self.shape)


def pack(
    samples: Sequence[TrainingSample],
    *,
    shapes: Sequence[Shape],
    align: int,
    n_ranks: int,
    linear_cost: int = 24576,
) -> list[Packed]:
    """Micro-batches [n_ranks * rows, T], with (rows, T) in `shapes`, that hold each sample once.

    Raises ValueError if a sequence is longer than the longest row, if a prompt is empty, or if a
    row length is not a multiple of `align`.
    """
    if not samples:
        return []
    shapes = sorted(set(shapes), key=lambda shape: (shape[1], shape[0]))
    _check_shapes(shapes, align=align)
    prompt_len = np.array([len(s.prompt_tokens) for s in samples])
    response_len = np.array([len(s.tokens) for s in samples])
    lens = prompt_len + response_len - 1
    _check_lens(samples, lens, prompt_len, longest=shapes[-1][1])

    size = -(-lens // align) * align
    plan = _plan(size, shapes, n_ranks)
    row, start = _balance(plan, size, lens * linear_cost + lens * lens, n_ranks)
    return _fill(samples, plan, row, start, prompt_len, response_len, n_ranks)


def pack_samples(
    samples: Sequence[TrainingSample], cfg: LearnerConfig, n_ranks: int
) -> list[Packed]:
    """`pack` with the shapes and the alignment of the config."""
    return pack(samples, shapes=cfg.shapes, align=cfg.segment_align, n_ranks=n_ranks)


def padding_fraction(packed: Sequence[Packed]) -> float:
    """Fraction of the tokens of all micro-batches that is padding."""
    if not packed:
        return 0.0
    sizes = [p.batch.tokens.size for p in packed]
    return float(np.average([p.padding_fraction for p in packed], weights=sizes))


def gather(
    arrays: Sequence[Shaped[np.ndarray, "_ _"]], packed: Sequence[Packed]
) -> list[Shaped[np.ndarray, " _"]]:
    """Converts one [B, T] result per micro-batch to one array [response_len] per sample."""
    found = {
        span.item: array[span.row, span.start : span.start + span.length]
        for array, micro in zip(arrays, packed, strict=True)
        for span in micro.spans
    }
    return [found[item] for item in range(len(found))]


def response_field(sample: TrainingSample, values: np.ndarray | None) -> np.ndarray:
    """`values`, one per response token; zeros if `values` is None."""
    return np.zeros(len(sample.tokens), np.float32) if values is None else values


def empty_batch(n_rows: int, row_len: int) -> Batch:
    """A batch of padding."""
    ints, floats = np.zeros((n_rows, row_len), np.int32), np.zeros((n_rows, row_len), np.float32)
    return Batch(
        tokens=ints,
        targets=ints,
        segments=ints,
        positions=ints,
        mask=floats,
        response_len=floats + 1.0,
        advantages=floats,
        values=floats,
        returns=floats,
        selected=floats,
        rollout_logp=floats,
        behavior_logp=floats,
        old_logp=floats,
        ref_logp=floats,
    )


def _check_shapes(shapes: Sequence[Shape], *, align: int) -> None:
    if not shapes:
        raise ValueError("no shapes given; set learner.buckets or learner.token_budget")
    for rows, row_len in shapes:
        if row_len <= 0 or row_len % align or rows <= 0:
            raise ValueError(
                f"a micro-batch of {rows} rows of {row_len} tokens is not a multiple of the "
                f"segment alignment {align}; set learner.buckets and learner.token_budget to "
                "multiples of learner.segment_align"
            )


def _check_lens(samples, lens, prompt_len, *, longest: int) -> None:
    if not prompt_len.all():
        item = int(np.argmin(prompt_len))
        raise ValueError(
            f"prompt {samples[item].prompt_id} has no tokens, so its first response token has no "
            "predecessor; let the chat template emit at least one token"
        )
    item = int(np.argmax(lens))
    if lens[item] > longest:
        s = samples[item]
        raise ValueError(
            f"prompt {s.prompt_id} sample {s.sample} takes {lens[item]} tokens (prompt "
            f"{len(s.prompt_tokens)} + response {len(s.tokens)} - 1), more than the longest row of "
            f"{longest}; raise the largest of learner.buckets (and learner.token_budget), or "
            "lower data.max_prompt_len or data.max_response_len"
        )


def _plan(size: np.ndarray, shapes: Sequence[Shape], n_ranks: int) -> _Plan:
    """The best of the plans without the 0, 1, 2, ... shortest row lengths."""
    plans = []
    for shortest in sorted({T for _, T in shapes}):
        most_rows = {T: rows for rows, T in sorted(shapes) if shortest <= T}
        plans.append(_shrink(_first_fit(size, most_rows, n_ranks), size, shapes, n_ranks))
    overhead = max(rows * T for rows, T in shapes) // 8
    return min(plans, key=lambda p: (p.tokens() + overhead * len(p.shape), p.area()))


def _first_fit(size: np.ndarray, rows_of: dict[int, int], n_ranks: int) -> _Plan:
    """First-fit decreasing. If no row fits, opens a micro-batch of the shortest rows that do."""
    free = np.zeros(0, size.dtype)
    shapes: list[Shape] = []
    first_row: list[int] = []
    row_of = np.zeros(len(size), int)
    for item in np.argsort(-size, kind="stable"):
        fits = free >= size[item]
        row = int(fits.argmax()) if len(free) else 0
        if not len(free) or not fits[row]:
            T = min(row_len for row_len in rows_of if row_len >= size[item])
            row = len(free)
            shapes.append((rows_of[T], T))
            first_row.append(row)
            free = np.concatenate([free, np.full(n_ranks * rows_of[T], T, size.dtype)])
        free[row] -= size[item]
        row_of[item] = row
    micro_of = np.searchsorted(first_row, row_of, side="right") - 1
    return _Plan(shapes, micro_of, row_of - np.array(first_row)[micro_of])


def _shrink(plan: _Plan, size: np.ndarray, shapes: Sequence[Shape], n_ranks: int) -> _Plan:
    """Shrinks each micro-batch to the smallest shape that holds its items."""
    by_size = sorted(shapes, key=lambda shape: (shape[0] * shape[1], shape[1]))
    for micro, (rows, T) in enumerate(plan.shape):
        items = np.flatnonzero(plan.micro_of == micro)
        used = size[items].sum()
        for shape in by_size:
            if shape[0] * shape[1] >= rows * T:
                break
            if used > n_ranks * shape[0] * shape[1] or size[items].max() > shape[1]:
                continue
            tight = _first_fit(size[items], {shape[1]: shape[0]}, n_ranks)
            if len(tight.shape) == 1:
                plan.shape[micro], plan.row_of[items] = shape, tight.row_of
                break
    return plan


def _balance(
    plan: _Plan, size: np.ndarray, cost: np.ndarray, n_ranks: int
) -> tuple[np.ndarray, np.ndarray]:
    """(row within its micro-batch, start) of every item; rows are ordered by rank."""
    row, start = np.zeros(len(size), int), np.zeros(len(size), int)
    for micro, (rows, T) in enumerate(plan.shape):
        n_rows = n_ranks * rows
        items = np.flatnonzero(plan.micro_of == micro)
        items = items[np.lexsort((items, -size[items], -cost[items]))]
        local = _assign_items(items, size, cost, T, n_rows, n_ranks)
        if local is None:
            local = _assign_rows(plan.row_of[items], cost[items], n_rows, n_ranks)
        used = np.zeros(n_rows, int)
        for item, where in zip(items, local, strict=True):
            row[item], start[item] = where, used[where]
            used[where] += size[item]
    return row, start


def _assign_items(items, size, cost, T: int, n_rows: int, n_ranks: int) -> np.ndarray | None:
    """Assigns each item to the cheapest rank with room, there to the fullest row with room.

    Returns the row of each item, or None if an item finds no room.
    """
    free = np.full((n_ranks, n_rows // n_ranks), T)
    load = np.zeros(n_ranks)
    local = np.zeros(len(items), int)
    for i, item in enumerate(items):
        room = free >= size[item]
        open_ranks = room.any(axis=1)
        if not open_ranks.any():
            return None
        rank = int(np.where(open_ranks, load, np.inf).argmin())
        column = int(np.where(room[rank], free[rank], T + 1).argmin())
        free[rank, column] -= size[item]
        load[rank] += cost[item]
        local[i] = rank * free.shape[1] + column
    return local


def _assign_rows(row_of: np.ndarray, cost: np.ndarray, n_rows: int, n_ranks: int) -> np.ndarray:
    """Assigns each whole row to the cheapest rank that has a free row."""
    per_rank = n_rows // n_ranks
    row_cost = np.bincount(row_of, weights=cost, minlength=n_rows)
    load, used, new_row = np.zeros(n_ranks), np.zeros(n_ranks, int), np.zeros(n_rows, int)
    for row in np.argsort(-row_cost, kind="stable"):
        rank = int(np.where(used < per_rank, load, np.inf).argmin())
        new_row[row] = rank * per_rank + used[rank]
        used[rank] += 1
        load[rank] += row_cost[row]
    return new_row[row_of]


def _fill(samples, plan: _Plan, row, start, prompt_len, response_len, n_ranks: int) -> list[Packed]:
    """Writes all micro-batches to one flat buffer per field and returns [B, T] views of it."""
    T_of = np.array([T for _, T in plan.shape])
    area = np.array([n_ranks * rows * T for rows, T in plan.shape])
    offset = np.concatenate([[0], np.cumsum(area)])
    first_row = np.cumsum(area // T_of) - area // T_of
    micro_of = plan.micro_of
    base = offset[micro_of] + row * T_of[micro_of] + start

    segment = _segment_ids(first_row[micro_of] + row, start)
    fields = _flat_fields(samples, base, segment, int(offset[-1]), prompt_len)
    packed = []
    for micro, T in enumerate(T_of):
        cut = slice(offset[micro], offset[micro + 1])
        batch = Batch(**{name: flat[cut].reshape(-1, T) for name, flat in fields.items()})
        spans = tuple(
            Span(
                item=int(i),
                row=int(row[i]),
                start=int(start[i] + prompt_len[i] - 1),
                length=int(response_len[i]),
            )
            for i in np.flatnonzero(micro_of == micro)
        )
        located = [(samples[s.item].support, int(s.row * T + s.start)) for s in spans]
        batch = dataclasses.replace(batch, support=pack_sets(located))
        packed.append(Packed(batch=batch, spans=spans))
    return packed


def _segment_ids(row: np.ndarray, start: np.ndarray) -> np.ndarray:
    """Segment ids 1, 2, ... along each row."""
    order = np.lexsort((start, row))
    sorted_rows = row[order]
    ids = np.zeros(len(row), np.int32)
    ids[order] = np.arange(len(row)) - np.searchsorted(sorted_rows, sorted_rows) + 1
    return ids


def _flat_fields(samples, base, segment, n_flat: int, prompt_len) -> dict[str, Any]:
    """Every field of Batch as an array [n_flat]; the tokens of item i start at base[i]."""
    sequences = [part for s in samples for part in (s.prompt_tokens, s.tokens)]
    all_tokens = np.concatenate(sequences).astype(np.int32)
    response_len = np.array([len(s.tokens) for s in samples])
    lens = prompt_len + response_len - 1
    within = np.arange(lens.sum()) - np.repeat(np.cumsum(lens) - lens, lens)
    source = within + np.repeat(np.cumsum(lens + 1) - (lens + 1), lens)
    at = within + np.repeat(base, lens)
    is_response = within >= np.repeat(prompt_len - 1, lens)
    loss_mask = [s.loss_mask for s in samples]
    n_loss_tokens = np.array([s.episode_loss_tokens or s.n_loss_tokens for s in samples])

    def filled(values, dtype, where=at, pad=0) -> np.ndarray:
        flat = np.full(n_flat, pad, dtype)
        flat[where] = values
        return flat

    def per_response(fields: list[np.ndarray | None]) -> np.ndarray:
        pairs = zip(samples, fields, strict=True)
        joined = np.concatenate([response_field(s, field) for s, field in pairs])
        return filled(joined, np.float32, where=at[is_response])

    response_fields = {
        name: per_response([getattr(s, name) for s in samples])
        for name in ("advantages", "values", "returns", "selected", "rollout_logp")
    }
    unfiltered = [s.rollout_logp if s.behavior_logp is None else s.behavior_logp for s in samples]
    response_fields["behavior_logp"] = per_response(unfiltered)
    return response_fields | {
        "tokens": filled(all_tokens[source], np.int32),
        "targets": filled(all_tokens[source + 1], np.int32),
        "segments": filled(np.repeat(segment, lens), np.int32),
        "positions": filled(within, np.int32),
        "mask": filled(np.concatenate(loss_mask), np.float32, where=at[is_response]),
        "response_len": filled(np.repeat(np.maximum(n_loss_tokens, 1), lens), np.float32, pad=1),
        "old_logp": np.zeros(n_flat, np.float32),
        "ref_logp": np.zeros(n_flat, np.float32),
    }
