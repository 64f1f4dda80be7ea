"""The declared shapes of dispatches, and the host-side arrays that fill them."""

import dataclasses
import functools
from collections.abc import Callable

import numpy as np

from jaxrl.config.keys import RolloutConfig
from jaxrl.data.support import n_words
from jaxrl.engine.api import LogitAdjustments, Request
from jaxrl.engine.device.adjustments import MAX_BIAS, Adjustments
from jaxrl.engine.device.decode_loop import DecodeBatch
from jaxrl.engine.device.kv_pool import window_page_counts
from jaxrl.engine.device.programs import PrefillBatch, PrefillImages
from jaxrl.engine.device.sampling import FILTERS, SamplingParams
from jaxrl.engine.images import ImageSettings, ImageTable
from jaxrl.engine.prefill import PrefillChunk
from jaxrl.engine.sequence import Sequence as RunningSequence
from jaxrl.models.config import DecoderConfig
from jaxrl.models.image_features import ImageFeatures
from jaxrl.models.paged import PrefillSlots

MAX_STOP_IDS = 16  # stop token ids per request
PREFILL_LEN = 64  # tokens of a prefill row; longer pages make longer rows
UINT32 = 0xFFFFFFFF  # the bits of a number that a random key uses
NO_ADJUSTMENTS = LogitAdjustments()


@dataclasses.dataclass(frozen=True)
class DispatchShapes:
    """The shapes that programs are compiled for; no dispatch has any other."""

    prefill_row_len: int  # tokens, a multiple of page_len
    max_pages_per_seq: int  # columns of a page table
    windows: tuple[int, ...]  # of the page tables; 0 is that of layers that keep all tokens
    history_len: int  # tokens of a decode row's history
    keep_history: bool  # of every batch, for speculation; else only of those with adjustments
    n_vocab: int
    decode_buckets: tuple[int, ...]  # sequences of a decode batch, ascending
    prefill_buckets: tuple[int, ...]  # rows of a prefill dispatch, ascending
    mixed: bool  # whether prefill and a decode step may share a dispatch
    adapters: bool  # whether every row has an adapter, or none
    states: bool  # whether every sequence has a slot of state
    images: ImageSettings | None  # None: no request has images

    @property
    def whole_images(self) -> bool:
        """Whether a call of prefill has all tokens of an image."""
        return self.images is not None and self.images.whole

    @property
    def prefill_len(self) -> int:
        """Tokens of the largest call of prefill."""
        return self.prefill_buckets[-1] * self.prefill_row_len


def dispatch_shapes(
    rollout: RolloutConfig,
    max_len: int,
    cfg: DecoderConfig,
    images: ImageSettings | None = None,
) -> DispatchShapes:
    """The shapes for `rollout`, the model and sequences of up to `max_len` tokens.

    Mixing prefill with decode needs prompts long enough to fill a dispatch (those of all slots
    together), the prefix cache, which holds the chunks of a prompt, and divisible prompts.
    """
    page_len = rollout.page_len
    row_len = max(page_len, PREFILL_LEN // page_len * page_len)
    max_pages = -(-max_len // page_len)
    prefill = prefill_buckets(rollout.max_num_batched_tokens // row_len)
    prompt_rows = rollout.max_num_seqs * -(-(max_len - 1) // row_len)
    return DispatchShapes(
        prefill_row_len=row_len,
        max_pages_per_seq=max_pages,
        windows=(0, *window_page_counts(cfg, rollout, max_len)),
        history_len=max_pages * page_len,
        keep_history=rollout.spec_tokens > 0,
        n_vocab=cfg.V,
        decode_buckets=decode_buckets(rollout.max_num_seqs),
        prefill_buckets=prefill,
        mixed=rollout.prefix_cache
        and prompt_rows >= prefill[-1]
        and not (images is not None and images.whole),
        adapters=cfg.lora is not None and cfg.lora.n_stacked > 0,
        states=bool(cfg.state_layers),
        images=images,
    )


def decode_buckets(largest: int) -> tuple[int, ...]:
    """Decode batch sizes: doubling from 8 (4 if `largest` is at most 16), and 3/4 of `largest`.

    A rollout whose sequences end one by one spends most of its time at three quarters. Smaller
    batches are no faster, and a batch of one takes another path on CPU: slow, and rounded
    differently.
    """
    sizes = {max(largest, 2)} | ({largest * 3 // 4} if largest >= 32 else set())
    size = 4 if largest <= 16 else 8
    while size < largest:
        sizes.add(size)
        size *= 2
    return tuple(sorted(sizes))


def exit_size(n: int, buckets: tuple[int, ...], n_waiting: int) -> int:
    """Running sequences of `n` at which a decode dispatch ends early.

    A smaller batch then suffices, or ended sequences have made room for waiting ones.
    """
    if n_waiting:
        return n - max(1, n // 32)
    return max((size for size in buckets if size < n), default=0)


def prefill_buckets(largest: int) -> tuple[int, ...]:
    """Rows of a prefill dispatch: 2, 8, 32, ...; more rows take several dispatches."""
    sizes = [2]
    while sizes[-1] * 4 <= largest:
        sizes.append(sizes[-1] * 4)
    return tuple(sizes)


def pad_replicas[T](by_replica: list[list[T]], bucket: int) -> list[T | None]:
    """The rows of a dispatch: `bucket` rows per replica, padded with None."""
    return [rows[i] if i < len(rows) else None for rows in by_replica for i in range(bucket)]


def prefill_batch(
    rows: list[PrefillChunk | None], shapes: DispatchShapes, images: ImageTable | None = None
) -> PrefillBatch:
    """The arrays of prefill rows, None being padding; `images` has those of their tokens."""
    tokens = np.zeros((len(rows), shapes.prefill_row_len), np.int32)
    positions = np.full((len(rows), shapes.prefill_row_len), -1, np.int32)
    for b, row in enumerate(rows):
        if row is not None:
            tokens[b, : len(row.tokens)] = row.tokens
            positions[b, : len(row.tokens)] = row.start + np.arange(len(row.tokens))
    ids = [0 if row is None else row.adapter for row in rows]
    adapters = np.array(ids, np.int32) if shapes.adapters else None
    tables = _prefill_tables(rows, shapes)
    slots, found = _prefill_slots(rows, shapes), None
    if images is not None:
        found = _prefill_images(rows, tokens, positions, images)
        tokens = np.where(tokens < 0, images.settings.token, tokens)
    return PrefillBatch(tokens, positions, tables, adapters, slots, found)


def _prefill_images(
    rows: list[PrefillChunk | None],
    tokens: np.ndarray,
    positions: np.ndarray,
    images: ImageTable,
) -> PrefillImages:
    """The features of the tokens of images, and positions of a model that has others."""
    axes = None
    if images.settings.merge:
        axes = np.repeat(positions[..., None], 3, axis=-1)
        for b, row in enumerate(rows):
            if row is not None and row.axes is not None:
                axes[b, : len(row.axes)] = row.axes
    ahead = positions.copy() if images.settings.whole else None
    for b, row in enumerate(rows):
        if ahead is not None and row is not None and row.ahead is not None:
            ahead[b, : len(row.ahead)] = row.ahead
    features, deep = images.features(tokens)
    return PrefillImages(ImageFeatures(features, tokens < 0, deep), axes, ahead)


def _prefill_slots(rows: list[PrefillChunk | None], shapes: DispatchShapes) -> PrefillSlots | None:
    if not shapes.states:
        return None
    columns = [(0, 0) if row is None else (row.source, row.target) for row in rows]
    return PrefillSlots(*np.array(columns, np.int32).reshape(-1, 2).T)


def decode_batch(
    by_replica: list[list[RunningSequence]],
    bucket: int,
    shapes: DispatchShapes,
    eos_ids: tuple[int, ...],
    *,
    adjusted: bool,
    filters: tuple[str, ...],
) -> DecodeBatch:
    """The arrays of the next decode step of each sequence, `bucket` rows per replica.

    They have adjustments if `adjusted`, and of the sampling filters those in `filters`.
    """
    seqs = [seq for own in by_replica for seq in own]
    places = [r * bucket + b for r, own in enumerate(by_replica) for b in range(len(own))]
    index, n_rows = np.array(places, np.int64), len(by_replica) * bucket

    def column(dtype: type, pad: int, values: list[int]) -> np.ndarray:
        whole = np.full(n_rows, pad, dtype)
        whole[index] = values
        return whole

    requests = np.full(n_rows, PADDING)
    requests[index] = np.frombuffer(
        b"".join([seq.packed or _pack(seq, eos_ids, shapes.images) for seq in seqs]), REQUEST
    )
    fixed = {name: np.ascontiguousarray(requests[name]) for name in requests.dtype.names or ()}
    rows = pad_replicas(by_replica, bucket) if shapes.keep_history or adjusted else []
    return DecodeBatch(
        token=column(np.int32, 0, [seq.last_token for seq in seqs]),
        position=column(np.int32, -1, [seq.n_tokens - 1 for seq in seqs]),
        remaining=column(np.int32, 0, [seq.remaining_in_dispatch for seq in seqs]),
        seed=fixed["seed"],
        prompt_id=fixed["prompt_id"],
        sample=fixed["sample"],
        stop_ids=fixed["stop_ids"],
        page_tables=decode_tables(by_replica, bucket, shapes),
        sampling=SamplingParams(fixed["temperature"], **{name: fixed[name] for name in filters}),
        history=_history(rows, shapes) if rows else None,
        adjustments=_adjustments(rows, shapes.n_vocab) if adjusted else None,
        adapter=fixed["adapter"] if shapes.adapters else None,
        slots=column(np.int32, 0, [seq.state for seq in seqs]) if shapes.states else None,
        delta=fixed["delta"] if shapes.images is not None and shapes.images.merge else None,
    )


# The columns of a decode batch that a request has from its start to its end.
REQUEST = np.dtype(
    [
        ("seed", np.uint32),
        ("prompt_id", np.uint32),
        ("sample", np.uint32),
        ("temperature", np.float32),
        ("top_k", np.int32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("adapter", np.int32),
        ("delta", np.int32),
        ("stop_ids", np.int32, MAX_STOP_IDS),
    ]
)
PADDING = np.array((0, 0, 0, 0, 0, 1, 0, 0, 0, -1), REQUEST)


def _pack(seq: RunningSequence, eos_ids: tuple[int, ...], images: ImageSettings | None) -> bytes:
    """The REQUEST of a sequence, which keeps it."""
    request, sampling, row = seq.request, seq.request.sampling, PADDING.copy()
    row["seed"], row["prompt_id"] = request.seed & UINT32, request.prompt_id & UINT32
    row["sample"], row["adapter"] = request.sample, request.adapter
    for name in ("temperature", "top_k", "top_p", "min_p"):
        row[name] = getattr(sampling, name)
    if images is not None:
        row["delta"] = images.delta(request.images)
    if not request.ignore_stop:
        ids = stop_ids(request, eos_ids)
        row["stop_ids"][: len(ids)] = ids
    seq.packed = row.tobytes()
    return seq.packed


def _adjustments(rows: list[RunningSequence | None], n_vocab: int) -> Adjustments:
    """The adjustments of each row; those of padding and of requests without any have no effect."""
    column = functools.partial(_column, rows)
    bias_ids = np.full((len(rows), MAX_BIAS), n_vocab, np.int32)
    bias = np.zeros((len(rows), MAX_BIAS), np.float32)
    allowed = np.full((len(rows), n_words(n_vocab)), UINT32, np.uint32)
    for b, row in enumerate(rows):
        if row is None:
            continue
        for k, (token, value) in enumerate(_own(row).bias):
            bias_ids[b, k], bias[b, k] = token, value
        if row.allowed is not None:
            allowed[b] = row.allowed
    return Adjustments(
        repetition_penalty=column(np.float32, 1, lambda seq: _own(seq).repetition_penalty),
        frequency_penalty=column(np.float32, 0, lambda seq: _own(seq).frequency_penalty),
        presence_penalty=column(np.float32, 0, lambda seq: _own(seq).presence_penalty),
        bias_ids=bias_ids,
        bias=bias,
        min_tokens=column(np.int32, 0, lambda seq: _own(seq).min_tokens),
        prompt_len=column(np.int32, 0, lambda seq: len(seq.request.tokens)),
        allowed=allowed,
        top_logprobs=column(np.bool_, 0, lambda seq: seq.request.top_logprobs),
    )


def _own(seq: RunningSequence) -> LogitAdjustments:
    return seq.request.adjustments or NO_ADJUSTMENTS


def _column(
    rows: list[RunningSequence | None],
    dtype: type,
    pad: int,
    value: Callable[[RunningSequence], int | float],
) -> np.ndarray:
    return np.array([pad if row is None else value(row) for row in rows], dtype)


def stop_ids(request: Request, eos_ids: tuple[int, ...]) -> tuple[int, ...]:
    """All token ids that end the request."""
    return eos_ids + request.sampling.stop_token_ids


def _history(rows: list[RunningSequence | None], shapes: DispatchShapes) -> np.ndarray:
    tokens = np.zeros((len(rows), shapes.history_len), np.int32)
    for b, row in enumerate(rows):
        if row is not None:
            tokens[b, : row.n_tokens] = row.tokens
    return tokens if shapes.images is None else np.where(tokens < 0, shapes.images.token, tokens)


def decode_tables(
    by_replica: list[list[RunningSequence]], bucket: int, shapes: DispatchShapes
) -> dict[int, np.ndarray]:
    """The page tables of the sequences, by window; zeros for those that have ended."""
    none = np.zeros(shapes.max_pages_per_seq, np.int32)
    shape = len(by_replica), bucket, shapes.max_pages_per_seq
    tables = {window: np.zeros(shape, np.int32) for window in shapes.windows}
    for window, table in tables.items():
        for rows, own in zip(table, by_replica, strict=True):
            if own:
                found = [seq.tables.get(window, none) for seq in own]
                # As np.stack, which calls Python for every array.
                np.concatenate(found, out=rows[: len(own)].reshape(-1))
    return {window: table.reshape(-1, shape[-1]) for window, table in tables.items()}


def _prefill_tables(
    rows: list[PrefillChunk | None], shapes: DispatchShapes
) -> dict[int, np.ndarray]:
    shape = len(rows), shapes.max_pages_per_seq
    tables = {window: np.zeros(shape, np.int32) for window in shapes.windows}
    for b, row in enumerate(rows):
        for window, pages in row.tables.items() if row is not None else ():
            tables[window][b, : len(pages)] = pages
    return tables


def check_limits(rollout: RolloutConfig, cfg: DecoderConfig, max_len: int) -> None:
    """Raises ValueError for limits of an engine that are impossible."""
    if max_len > cfg.context_len:
        raise ValueError(
            f"prompt and response may take {max_len} tokens, the model supports {cfg.context_len}; "
            "lower config.data.max_prompt_len or config.data.max_response_len"
        )
    for name in ("max_num_seqs", "max_num_batched_tokens", "page_len", "steps_per_dispatch"):
        if (value := getattr(rollout, name)) < 1:
            raise ValueError(f"config.rollout.{name} is {value}; set it to 1 or more")


def check_request(
    request: Request,
    cfg: DecoderConfig,
    eos_ids: tuple[int, ...],
    *,
    adjustable: bool,
    filters: tuple[str, ...],
    images: ImageSettings | None = None,
) -> None:
    """Raises ValueError if no row of a batch can have the request."""
    n_adapters = cfg.lora.n_stacked if cfg.lora else 0
    if not 0 <= request.adapter <= n_adapters:
        raise ValueError(
            f"adapter {request.adapter} of a request is not there; the engine has {n_adapters}"
        )
    if request.images and images is None:
        raise ValueError(
            "a request has images, and this engine was built without; use a model with a vision "
            "tower and set data.images=True"
        )
    if (n := len(stop_ids(request, eos_ids))) > MAX_STOP_IDS:
        raise ValueError(
            f"{n} stop token ids (end-of-sequence ids included), at most {MAX_STOP_IDS} are "
            "supported; shorten config.rollout.sampling.stop_token_ids"
        )
    if _is_adjusted(request) and not adjustable:
        raise ValueError(
            "this engine was built without logit adjustments and top logprobs; set adjustable=True"
        )
    if missing := [name for name in request.sampling.filters if name not in filters]:
        raise ValueError(
            f"this engine was built without the sampling filter {' and '.join(missing)} of a "
            f"request; set filters={FILTERS}"
        )
    if request.adjustments and (n := len(request.adjustments.bias)) > MAX_BIAS:
        raise ValueError(f"{n} tokens have a bias, at most {MAX_BIAS} are supported")


def adjusted_rows(seqs: list[list[RunningSequence]]) -> bool:
    """Whether a sequence needs the programs with adjustments."""
    return any(_is_adjusted(seq.request) for own in seqs for seq in own)


def _is_adjusted(request: Request) -> bool:
    """Whether it needs the programs that change logits and return the most likely tokens."""
    return request.adjustments is not None or request.top_logprobs
