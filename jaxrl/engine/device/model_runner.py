"""Runs the compiled programs: fills their arrays, donates the KV cache, reads their output."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl.config.keys import RolloutConfig
from jaxrl.engine.api import TopTokens
from jaxrl.engine.device import programs
from jaxrl.engine.device.batches import DispatchShapes, decode_batch, pad_replicas, prefill_batch
from jaxrl.engine.device.decode_loop import DecodeBatch, DispatchOutput
from jaxrl.engine.device.kv_pool import KVPoolSpec
from jaxrl.engine.device.programs import PrefillBatch
from jaxrl.engine.device.speculative import SpeculationConfig
from jaxrl.engine.prefill import PageCopy, PrefillChunk, StateCopy
from jaxrl.engine.scheduler import Sequence
from jaxrl.models.kv_cache import KVCache
from jaxrl.types import Tree
from sharding import on_mesh

COPIES_PER_CALL = 16  # pages or states copied by one call
COPIES = ("copy_pages", "copy_states")


class Dispatch(NamedTuple):
    """A program of the engine: its kind, and the rows or sequences that it takes."""

    kind: str  # prefill, mixed, copy_pages, copy_states or decode
    bucket: int
    adjusted: bool = False  # with adjustments
    filtered: bool = False  # with sampling filters


@dataclasses.dataclass(frozen=True)
class DecodeOutput:
    """Sampled tokens of one dispatch, on the host."""

    tokens: np.ndarray  # int32 [B, n], without gaps, then -1
    logp: np.ndarray  # float32 [B, n]
    behavior_logp: np.ndarray  # float32 [B, n]
    support: np.ndarray | None  # uint32 [n, B, W]; None if not recorded, or without a filter
    top: np.ndarray | None  # int32 [n, B, 2 * N_TOP], see `Sample.top`; None if no row wants it
    n_steps: int  # forward passes
    n_draft_tokens: int = 0
    n_accepted_tokens: int = 0

    @property
    def n_tokens(self) -> int:
        return int((self.tokens >= 0).sum())

    def top_tokens(self, row: int, n: int) -> TopTokens | None:
        """The most likely tokens at the first `n` positions of a row."""
        if self.top is None:
            return None
        ids, bits = np.split(self.top[:n, row], 2, axis=1)
        return TopTokens(ids.copy(), bits.copy().view(np.float32))


class ModelRunner:
    """Prefill, mixed, copy and decode dispatches in declared shapes.

    Rows and sequences come as one list per replica. The cache exists from the first call to
    `release`.
    """

    def __init__(
        self,
        pool: KVPoolSpec,
        shapes: DispatchShapes,
        rollout: RolloutConfig,
        *,
        eos_ids: tuple[int, ...],
        implementation: str | None,
        keep_support: bool,
        filters: tuple[str, ...],
        n_pages: Callable[[], int],
        on_failure: Callable[[], None],
    ):
        """`filters` are the sampling filters of programs that have any, by their config keys.

        `n_pages` gives the size of each replica's pool when the cache is allocated.

        A failed call loses the donated cache; then `on_failure` drops all references to its pages.
        """
        self.pool, self.shapes = pool, shapes
        self.speculation = (
            SpeculationConfig(rollout.spec_tokens, rollout.spec_ngram)
            if rollout.spec_tokens
            else None
        )
        model = {"rules": pool.rules, "implementation": implementation}
        samples = model | {"keep_support": keep_support}
        decodes = {"max_steps": rollout.steps_per_dispatch, "speculation": self.speculation}
        self._static: dict[str, dict[str, Any]] = {  # arguments of the programs
            "prefill": model,
            "mixed": samples,
            "copy_pages": {
                "rules": pool.rules,
                "stacked": pool.cfg.stacked,
                "windows": tuple(layer.mixer.window for layer in pool.cfg.layers),
            },
            "copy_states": {"rules": pool.rules, "stacked": pool.cfg.stacked},
            "decode": samples | decodes,
        }
        self._decode = programs.decode_as_graph if rollout.cuda_graph else programs.decode
        self.cache: KVCache | None = None
        self.device_s = 0.0  # wall time of program calls
        self._eos_ids, self._filters = eos_ids, filters
        self._filters_rollouts = bool(rollout.sampling.filters)
        self._n_pages, self._on_failure = n_pages, on_failure

    def allocated_cache(self) -> KVCache:
        """The cache, allocated if there is none."""
        if self.cache is None:
            self.cache = self.pool.allocate(self._n_pages())
        return self.cache

    def release(self) -> None:
        """Frees the memory of the cache."""
        self.cache = None

    def prefill(self, params: Tree, rows: list[list[PrefillChunk]], bucket: int) -> None:
        """Computes the KV of up to `bucket` prefill rows of each replica."""
        prefilled = self._prefill_batch(rows, bucket)
        with self._call():
            cache = self.allocated_cache()
            self.cache = programs.prefill(params, cache, prefilled, **self._static["prefill"])

    def mixed(
        self,
        params: Tree,
        rows: list[list[PrefillChunk]],
        seqs: list[list[Sequence]],
        *,
        adjusted: bool = False,
        filtered: bool = False,
    ) -> DecodeOutput:
        """Prefill rows and one decode step of `seqs` in one dispatch.

        Uses the largest buckets only: only long prompts are worth mixing with decode. `adjusted`
        and `filtered` as in `decode`.
        """
        bucket = self.shapes.prefill_buckets[-1]
        prefilled = self._prefill_batch(rows, bucket)
        size = self.shapes.decode_buckets[-1]
        batch = self.decode_batch(seqs, size, adjusted=adjusted, filtered=filtered)
        with self._call():
            self.cache, out = programs.mixed(
                params, self.allocated_cache(), prefilled, batch, **self._static["mixed"]
            )
            return read_decode_output(out, seqs)

    def copy_pages(self, copies: list[list[PageCopy]]) -> None:
        """Copies up to COPIES_PER_CALL pages of each replica."""
        windows = self.shapes.windows
        columns = self._columns(copies, padding=(0, self._n_pages()) * len(windows))
        pairs = (dict(zip(windows, columns[i::2], strict=True)) for i in (0, 1))
        self._copy("copy_pages", *pairs)

    def copy_states(self, copies: list[list[StateCopy]]) -> None:
        """Copies up to COPIES_PER_CALL states of each replica."""
        self._copy("copy_states", *self._columns(copies, padding=(0, 0)))

    def _columns(
        self, copies: list[list[PageCopy]] | list[list[StateCopy]], *, padding: tuple[int, ...]
    ) -> np.ndarray:
        rows = pad_replicas(copies, COPIES_PER_CALL)
        return np.array([row or padding for row in rows], np.int32).T

    def _copy(self, kind: str, sources: Tree, targets: Tree) -> None:
        with self._call():
            cache = self.allocated_cache()
            self.cache = getattr(programs, kind)(cache, sources, targets, **self._static[kind])

    def decode(
        self,
        params: Tree,
        seqs: list[list[Sequence]],
        bucket: int,
        *,
        n_steps: int,
        exit_at: int,
        adjusted: bool = False,
        filtered: bool = False,
    ) -> DecodeOutput:
        """Up to `n_steps` decode steps, until `exit_at` or fewer sequences of a replica run.

        `adjusted` and `filtered` select the program with adjustments and with filters.
        """
        batch = self.decode_batch(seqs, bucket, adjusted=adjusted, filtered=filtered)
        with self._call():
            self.cache, out = self._decode(
                params,
                self.allocated_cache(),
                batch,
                np.int32(n_steps),
                np.int32(exit_at),
                **self._static["decode"],
            )
            return read_decode_output(out, seqs, speculative=self.speculation is not None)

    def declared(self, *, adjustable: bool) -> list[Dispatch]:
        """Every program of the declared shapes; `adjustable` adds those with adjustments.

        Programs that sample exist without filters, and with them if the engine has any. Those with
        adjustments have the filters, too.
        """
        shapes, filtered = self.shapes, bool(self._filters)
        variants = dict.fromkeys([(False, False), (False, filtered)])
        variants = [*variants, (True, filtered)] if adjustable else [*variants]
        prefill = [Dispatch("prefill", bucket) for bucket in shapes.prefill_buckets]
        longest = shapes.prefill_buckets[-1]
        mixed = [Dispatch("mixed", longest, *v) for v in variants if shapes.mixed]
        decode = [Dispatch("decode", b, *v) for v in variants for b in shapes.decode_buckets]
        kinds = COPIES if shapes.states else COPIES[:1]
        copies = [Dispatch(kind, COPIES_PER_CALL) for kind in kinds]
        return [*prefill, *mixed, *copies, *decode]

    def run_on_padding(self, params: Tree, program: Dispatch) -> None:
        """Runs a program without rows, which compiles it if it is not compiled yet."""
        (kind, bucket, *variant), none = program, self._no_rows
        adjusted, filtered = variant
        if kind == "prefill":
            self.prefill(params, none, bucket)
        elif kind == "copy_pages":
            self.copy_pages(none)
        elif kind == "copy_states":
            self.copy_states(none)
        elif kind == "mixed":
            self.mixed(params, none, none, adjusted=adjusted, filtered=filtered)
        else:
            variant = {"adjusted": adjusted, "filtered": filtered}
            self.decode(params, none, bucket, n_steps=0, exit_at=0, **variant)

    def lower_largest(self, params: Tree, n_pages: int, kind: str) -> jax.stages.Lowered:
        """`lower` of the largest program of a kind, for rollouts: without adjustments."""
        buckets = self.shapes.decode_buckets if kind == "decode" else self.shapes.prefill_buckets
        bucket = COPIES_PER_CALL if kind in COPIES else buckets[-1]
        return self.lower(params, n_pages, Dispatch(kind, bucket, filtered=self._filters_rollouts))

    def lower(self, params: Tree, n_pages: int, program: Dispatch) -> jax.stages.Lowered:
        """Lowers a program.

        For ahead-of-time compilation on the current mesh, with (abstract) parameters and a pool of
        `n_pages` pages.
        """
        mesh = jax.tree.leaves(params)[0].sharding.mesh
        cache = on_mesh(jax.eval_shape(lambda: self.pool.allocate(n_pages)), mesh)
        state = (cache,) if program.kind in COPIES else (params, cache)
        jitted = self._decode if program.kind == "decode" else getattr(programs, program.kind)
        return jitted.lower(*state, *self._padding(program), **self._static[program.kind])

    def _padding(self, program: Dispatch) -> tuple[Any, ...]:
        """The inputs of a program without rows."""
        (kind, bucket, adjusted, filtered), none = program, self._no_rows
        if kind in COPIES:
            ids = np.zeros(self.pool.n_replicas * bucket, np.int32)
            by_window = dict.fromkeys(self.shapes.windows, ids)
            return (by_window if kind == "copy_pages" else ids,) * 2
        if kind == "prefill":
            return (self._prefill_batch(none, bucket),)
        if kind == "mixed":
            size = self.shapes.decode_buckets[-1]
            batch = self.decode_batch(none, size, adjusted=adjusted, filtered=filtered)
            return self._prefill_batch(none, bucket), batch
        batch = self.decode_batch(none, bucket, adjusted=adjusted, filtered=filtered)
        return batch, np.int32(0), np.int32(0)

    @property
    def _no_rows(self) -> list[list[Any]]:
        """No rows of any replica of the current mesh."""
        return [[] for _ in range(self.pool.n_replicas)]

    def decode_batch(
        self,
        seqs: list[list[Sequence]],
        bucket: int,
        *,
        adjusted: bool = False,
        filtered: bool = False,
    ) -> DecodeBatch:
        rows, filters = pad_replicas(seqs, bucket), self._filters if filtered else ()
        return decode_batch(rows, self.shapes, self._eos_ids, adjusted=adjusted, filters=filters)

    def _prefill_batch(self, rows: list[list[PrefillChunk]], bucket: int) -> PrefillBatch:
        return prefill_batch(pad_replicas(rows, bucket), self.shapes)

    @contextlib.contextmanager
    def _call(self) -> Iterator[None]:
        """Times a program call. If it fails, the donated cache is lost, with everything in it."""
        start = time.perf_counter()
        try:
            yield
        except BaseException:
            self.release()
            self._on_failure()
            raise
        finally:
            self.device_s += time.perf_counter() - start


def read_decode_output(
    output: DispatchOutput, seqs: list[list[Sequence]], *, speculative: bool = False
) -> DecodeOutput:
    """Copies what `decode_steps` or, if `speculative`, `speculative_steps` returned to the host.

    The supports are copied only if one of the sequences samples from a truncated distribution, and
    the most likely tokens only if one wants them.
    """
    requests = [seq.request for own in seqs for seq in own]
    out, support, top = np.asarray(output.columns), output.support, output.top
    if support is not None:
        filtered = any(request.sampling.filters for request in requests)
        support = np.asarray(support) if filtered else None
    if top is not None:
        top = np.asarray(top) if any(request.top_logprobs for request in requests) else None
    if not speculative:
        n_steps = int((out[0] >= 0).any(axis=0).sum())
        return DecodeOutput(*_columns(out[..., :n_steps]), support, top, n_steps)
    columns, (n_passes, n_draft_tokens, _) = out[..., :-1], out[..., -1]
    n_accepted_tokens = int((columns[0] >= 0).sum() - n_passes.sum())
    return DecodeOutput(
        *_columns(columns),
        support,
        top,
        int(n_passes.max()),
        int(n_draft_tokens.sum()),
        n_accepted_tokens,
    )


def _columns(out: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    tokens, *bits = out
    return tokens, *(column.view(np.float32) for column in bits)
