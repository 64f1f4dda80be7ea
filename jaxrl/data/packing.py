"""Packs sequences into rows: declared shapes, few micro-batches, balanced data-parallel ranks.

A sequence is prompt + response. It occupies prompt_len + response_len - 1 tokens of a row, because
its last token is only a target. It starts at a multiple of `align`, so its size is that length
rounded up to `align`. Sequences with common tokens may form a chain that has these tokens once
(data/rows.py). Chains of several lengths and no chains at all are tried, and the cheapest plan is
taken.

The cost of a sequence of n tokens, m of them shared with another one, is (n - m) * linear_cost +
n * n - m * m: matrix products and causal attention. Per layer and token they take 24 D² and 2 n D
operations, so linear_cost = 12 D. The default is for D = 2048, the value in verl's
`calculate_workload`.

Packing is deterministic: equal inputs give equal packings.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int, Shaped

from jaxrl.config.keys import RunConfig
from jaxrl.data.image_places import pack_axis_positions, pack_images
from jaxrl.data.routing import pack_experts
from jaxrl.data.rows import (
    Chain,
    Placement,
    RowShape,
    balance,
    best_plan,
    chain_sums,
    chains,
    separate,
    sharing_order,
    visibility,
)
from jaxrl.data.support import pack_sets
from jaxrl.types import Batch, TeacherBatch, TrainingSample


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

    batch: Batch  # numpy arrays [B, T]; old_logp is zero
    spans: tuple[Span, ...]

    @property
    def padding_fraction(self) -> float:
        """Fraction of the B * T tokens that is padding."""
        return float(np.mean(self.batch.segments == 0))


def sequence_lens(batch: Batch) -> Int[np.ndarray, "S"]:
    """Number of tokens of each sequence in a packed batch, shared ones included."""
    segments = np.asarray(batch.segments)
    after = np.pad(segments[:, 1:], ((0, 0), (0, 1)))
    return np.asarray(batch.positions)[(segments != 0) & (segments != after)] + 1


def shared_lens(batch: Batch) -> Int[np.ndarray, "S"]:
    """Number of tokens of each sequence that it takes from another one of its row."""
    segments = np.asarray(batch.segments)
    before = np.pad(segments[:, :-1], ((0, 0), (1, 0)))
    return np.asarray(batch.positions)[(segments != 0) & (segments != before)]


def pack_samples(samples: Sequence[TrainingSample], cfg: RunConfig, n_ranks: int) -> list[Packed]:
    """Micro-batches of the samples for `n_ranks` data-parallel ranks, as the config sets."""
    learner = cfg.learner
    return pack(
        samples,
        shapes=learner.shapes,
        align=learner.segment_align,
        n_ranks=n_ranks,
        share_prefixes=cfg.shares_prefixes,
    )


def pack(
    samples: Sequence[TrainingSample],
    *,
    shapes: Sequence[RowShape],
    align: int,
    n_ranks: int,
    linear_cost: int = 24576,
    share_prefixes: bool = False,
) -> list[Packed]:
    """Micro-batches [n_ranks * rows, T], with (rows, T) in `shapes`, that hold each sample once.

    With `share_prefixes` a row may have the common tokens of several samples once: pass its `until`
    to attention. Shared prefixes are multiples of `align` tokens.

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
    options = [separate(len(samples))]
    if share_prefixes:
        limits = sorted({row_len // n for _, row_len in shapes for n in (1, 2, 4)}, reverse=True)
        order = sharing_order(samples, lens, align)
        options = [chains(order, size, limit) for limit in limits] + options
    plans = [best_plan(chain_sums(option, size), shapes, n_ranks) for option in options]
    plan, placed = min(
        zip(plans, options, strict=True), key=lambda planned: planned[0].cost(shapes)
    )
    cost = chain_sums(placed, lens, lambda n: n * linear_cost + n * n)
    row, start = balance(plan, chain_sums(placed, size), cost, n_ranks)
    located = _locate(placed, plan.micro_of, row, start, lens, size)
    return _fill(samples, plan, located, prompt_len, response_len, n_ranks)


def padding_fraction(packed: Sequence[Packed]) -> float:
    """Fraction of the tokens of all micro-batches that is padding."""
    if not packed:
        return 0.0
    sizes = [p.batch.tokens.size for p in packed]
    return float(np.average([p.padding_fraction for p in packed], weights=sizes))


def shared_fraction(packed: Sequence[Packed]) -> float:
    """Fraction of the tokens of all sequences that are not computed because others have them."""
    if not packed:
        return 0.0
    shared, all_tokens = (
        sum(int(lens(p.batch).sum()) for p in packed) for lens in (shared_lens, sequence_lens)
    )
    return shared / max(all_tokens, 1)


def gather(
    arrays: Sequence[Shaped[np.ndarray, "_ _ ..."]], packed: Sequence[Packed]
) -> list[Shaped[np.ndarray, "_ ..."]]:
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


def empty_batch(n_rows: int, row_len: int, n_labels: int = 1) -> Batch:
    """A batch of padding; with several labels, values and returns have one number for each."""
    ints, floats = np.zeros((n_rows, row_len), np.int32), np.zeros((n_rows, row_len), np.float32)
    values = np.zeros((n_rows, row_len, n_labels), np.float32) if n_labels > 1 else floats
    return Batch(
        tokens=ints,
        targets=ints,
        segments=ints,
        positions=ints,
        until=ints - 1,
        copies=ints,
        mask=floats,
        response_len=floats + 1.0,
        advantages=floats,
        values=values,
        returns=values,
        selected=floats,
        rollout_logp=floats,
        behavior_logp=floats,
        old_logp=floats,
        ref_logp=floats,
    )


def _check_shapes(shapes: Sequence[RowShape], *, align: int) -> None:
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


@dataclasses.dataclass(frozen=True)
class _Located:
    """Micro-batch, row and first token of every sample, and what it leaves out."""

    micro: np.ndarray  # int [n]
    row: np.ndarray  # int [n], in its micro-batch, over all ranks
    start: np.ndarray  # int [n], place of its first token in the row
    skipped: np.ndarray  # int [n], tokens that it takes from samples before it in the row
    until: list[np.ndarray]  # per sample, int32 [tokens in the row]
    copies: list[np.ndarray]  # per sample, int32 [tokens in the row]


def _locate(placed: Sequence[Chain], micro_of, row_of, first, lens, size) -> _Located:
    """The samples of chains with these micro-batches, rows and first places."""
    micro, row, start, skipped = (np.zeros(len(lens), int) for _ in range(4))
    until: list[np.ndarray] = [np.zeros(0, np.int32)] * len(lens)
    copies = list(until)
    for c, chain in enumerate(placed):
        items = chain.items
        taken = size[items] - chain.skipped
        micro[items], row[items], skipped[items] = micro_of[c], row_of[c], chain.skipped
        start[items] = first[c] + np.cumsum(taken) - taken
        last = start[items] + lens[items] - chain.skipped - 1
        for i, *tokens in zip(items, *visibility(lens[items], chain.skipped, last), strict=True):
            until[i], copies[i] = tokens
    return _Located(micro, row, start, skipped, until, copies)


def _fill(samples, plan: Placement, at: _Located, prompt_len, response_len, n_ranks: int):
    """Writes all micro-batches to one flat buffer per field and returns [B, T] views of it."""
    T_of = np.array([T for _, T in plan.shape])
    area = np.array([n_ranks * rows * T for rows, T in plan.shape])
    offset = np.concatenate([[0], np.cumsum(area)])
    first_row = np.cumsum(area // T_of) - area // T_of
    base = offset[at.micro] + at.row * T_of[at.micro] + at.start

    segment = _segment_ids(first_row[at.micro] + at.row, at.start)
    fields = _flat_fields(samples, at, base, segment, int(offset[-1]), prompt_len)
    first_target = at.start + prompt_len - 1 - at.skipped
    packed = []
    for micro, T in enumerate(T_of):
        cut = slice(offset[micro], offset[micro + 1])
        batch = Batch(
            **{name: flat[cut].reshape(-1, T, *flat.shape[1:]) for name, flat in fields.items()}
        )
        items = np.flatnonzero(at.micro == micro)
        spans = tuple(
            Span(int(i), int(at.row[i]), int(first_target[i]), int(response_len[i])) for i in items
        )
        if any(samples[s.item].support is not None for s in spans):
            located = [(samples[s.item].support, int(s.row * T + s.start)) for s in spans]
            batch = dataclasses.replace(batch, support=pack_sets(located))
        if any(samples[s.item].experts is not None for s in spans):
            routed = [
                (samples[s.item].experts, samples[s.item].loss_mask, int(s.row * T + s.start))
                for s in spans
            ]
            batch = dataclasses.replace(batch, experts=pack_experts(routed))
        parts = [(samples[i], int(at.row[i] * T + at.start[i]), int(at.skipped[i])) for i in items]
        batch = dataclasses.replace(
            batch,
            images=pack_images(parts, batch.tokens.shape),
            axis_positions=pack_axis_positions(parts, batch.positions),
        )
        if any(samples[i].parts is not None for i in items):
            batch = dataclasses.replace(batch, parts=_pack_parts(samples, spans, batch))
        if k := max((_n_ids(samples[i]) for i in items), default=0):
            batch = dataclasses.replace(batch, teacher=_pack_teacher(samples, spans, batch, k))
        packed.append(Packed(batch, spans))
    return packed


def _pack_parts(samples, spans: Sequence[Span], batch: Batch) -> Int[np.ndarray, "B T"]:
    """The parts of the objective that train the targets of a micro-batch."""
    parts = np.zeros(batch.tokens.shape, np.int32)
    for span in spans:
        if (found := samples[span.item].parts) is not None:
            parts[span.row, span.start : span.start + span.length] = found
    return parts


def _n_ids(sample: TrainingSample) -> int:
    return 0 if sample.teacher is None else sample.teacher.ids.shape[1]


def _pack_teacher(samples, spans: Sequence[Span], batch: Batch, k: int) -> TeacherBatch:
    """The ids and logprobs of a teacher at the targets of a micro-batch."""
    packed = empty_teacher(batch.tokens.shape, k)
    for span in spans:
        if (found := samples[span.item].teacher) is not None:
            place = span.row, slice(span.start, span.start + span.length)
            packed.ids[place], packed.logp[place] = found.ids, found.logp
            packed.known[place] = samples[span.item].loss_mask
    return packed


def empty_teacher(shape: tuple[int, ...], k: int) -> TeacherBatch:
    """A batch that no teacher has read."""
    return TeacherBatch(
        ids=np.zeros((*shape, k), np.int32),
        logp=np.zeros((*shape, k), np.float32),
        known=np.zeros(shape, np.float32),
    )


def _segment_ids(row: np.ndarray, start: np.ndarray) -> np.ndarray:
    """Segment ids 1, 2, ... along each row."""
    order = np.lexsort((start, row))
    sorted_rows = row[order]
    ids = np.zeros(len(row), np.int32)
    ids[order] = np.arange(len(row)) - np.searchsorted(sorted_rows, sorted_rows) + 1
    return ids


def _flat_fields(samples, located: _Located, base, segment, n_flat: int, prompt_len):
    """Every field of Batch as an array [n_flat]; the tokens of item i start at base[i]."""
    sequences = [part for s in samples for part in (s.prompt_tokens, s.tokens)]
    all_tokens = np.concatenate(sequences).astype(np.int32)
    response_len = np.array([len(s.tokens) for s in samples])
    ends, lens = np.cumsum(prompt_len + response_len), prompt_len + response_len - 1
    skipped, lens = located.skipped, lens - located.skipped  # in the row
    within = np.arange(lens.sum()) - np.repeat(np.cumsum(lens) - lens - skipped, lens)
    source = within + np.repeat(ends - prompt_len - response_len, lens)
    at = within + np.repeat(base - skipped, lens)
    is_response = within >= np.repeat(prompt_len - 1, lens)
    loss_mask = [s.loss_mask for s in samples]
    n_loss_tokens = np.array([s.episode_loss_tokens or s.n_loss_tokens for s in samples])

    def filled(values, dtype, where=at, pad=0) -> np.ndarray:
        flat = np.full((n_flat, *np.shape(values)[1:]), pad, dtype)
        flat[where] = values
        return flat

    def per_response(fields: list[np.ndarray | None]) -> np.ndarray:
        pairs = zip(samples, fields, strict=True)
        joined = np.concatenate([response_field(s, field) for s, field in pairs])
        return filled(joined, np.float32, where=at[is_response])

    response_fields = {
        name: per_response([getattr(s, name) for s in samples])
        for name in ("advantages", "values", "returns", "selected", "rollout_logp", "ref_logp")
    }
    unfiltered = [s.rollout_logp if s.behavior_logp is None else s.behavior_logp for s in samples]
    response_fields["behavior_logp"] = per_response(unfiltered)
    return response_fields | {
        "tokens": filled(all_tokens[source], np.int32),
        "targets": filled(all_tokens[source + 1], np.int32),
        "segments": filled(np.repeat(segment, lens), np.int32),
        "positions": filled(within, np.int32),
        "until": filled(np.concatenate(located.until), np.int32, pad=-1),
        "copies": filled(np.concatenate(located.copies), np.int32),
        "mask": filled(np.concatenate(loss_mask), np.float32, where=at[is_response]),
        "response_len": filled(np.repeat(np.maximum(n_loss_tokens, 1), lens), np.float32, pad=1),
        "old_logp": np.zeros(n_flat, np.float32),
    }
