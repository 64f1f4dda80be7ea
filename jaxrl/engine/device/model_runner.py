"""Runs the compiled programs: fills their arrays, donates the KV cache, reads their output."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxrl.config.keys import RolloutConfig
from jaxrl.engine.device import programs
from jaxrl.engine.device.batches import (
    DispatchShapes,
    decode_batch,
    decode_tables,
    pad_replicas,
    prefill_batch,
)
from jaxrl.engine.device.decode_loop import (
    DecodeBatch,
    DecodeOutput,
    DecodeRound,
    read_decode_output,
    state_spec,
)
from jaxrl.engine.device.kv_pool import KVPoolSpec
from jaxrl.engine.device.programs import PrefillBatch
from jaxrl.engine.device.speculative import SpeculationConfig
from jaxrl.engine.images import ImageTable
from jaxrl.engine.prefill import PageCopy, PrefillChunk, StateCopy
from jaxrl.engine.sequence import Sequence
from jaxrl.models.kv_cache import KVCache, page_rules
from jaxrl.runtime.flat_program import Flattened, FlatTree, flatten, unflatten
from jaxrl.types import Tree
from sharding import on_mesh

COPIES_PER_CALL = 16  # pages or states copied by one call
COPIES = ("copy_pages", "copy_states")


class Variant(NamedTuple):
    """The abilities of a program that samples."""

    adjusted: bool = False  # with adjustments
    filtered: bool = False  # with sampling filters


PLAIN, FILTERED = Variant(), Variant(filtered=True)


class Dispatch(NamedTuple):
    """A program of the engine: its kind, and the rows or sequences that it takes."""

    kind: str  # prefill, mixed, copy_pages, copy_states or decode
    bucket: int
    variant: Variant = PLAIN


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
        keep_experts: bool,
        filters: tuple[str, ...],
        images: ImageTable | None,
        n_pages: Callable[[], int],
        on_failure: Callable[[], None],
    ):
        """`filters` are the sampling filters of programs that have any, by their config keys.

        `images` has the images of the sequences; None: no sequence has any.

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
        never = None if images is None else images.settings.token
        samples = model | {"keep_support": keep_support, "keep_experts": keep_experts}
        samples |= {"never": never}
        decodes = {
            "max_steps": rollout.steps_per_dispatch,
            "speculation": self.speculation,
            "cuda_graph": rollout.cuda_graph,
        }
        static: dict[str, dict[str, Any]] = {  # arguments of the programs
            "prefill": model,
            "mixed": samples,
            "copy_pages": {
                "rules": page_rules(pool.cfg, pool.rules),
                "stacked": pool.cfg.stacked,
                "windows": tuple(layer.mixer.window for layer in pool.cfg.layers),
            },
            "copy_states": {"rules": pool.rules, "stacked": pool.cfg.stacked},
            "decode": samples | decodes,
        }
        self._programs = {
            kind: programs.engine_program(kind, **values) for kind, values in static.items()
        }
        self._cache: FlatTree | None = None
        self._flat = Flattened()  # of the parameters, which every call gets again
        self.device_s = 0.0  # wall time of program calls
        self._eos_ids, self._filters, self._images = eos_ids, filters, images
        self._filters_rollouts = bool(rollout.sampling.filters)
        self._n_pages, self._on_failure = n_pages, on_failure

    @property
    def cache(self) -> KVCache | None:
        return unflatten(self._cache)

    def allocated_cache(self) -> FlatTree:
        """The cache, allocated if there is none."""
        if self._cache is None:
            self._cache = flatten(self.pool.allocate(self._n_pages()))
        return self._cache

    def release(self) -> None:
        """Frees the memory of the cache."""
        self._cache = None

    def prefill(self, params: Tree, rows: list[list[PrefillChunk]], bucket: int) -> None:
        """Computes the KV of up to `bucket` prefill rows of each replica."""
        prefilled = self._prefill_batch(rows, bucket)
        with self._call():
            cache = self.allocated_cache()
            self._cache = self._programs["prefill"](self._flat(params), cache, prefilled)

    def mixed(
        self,
        params: Tree,
        rows: list[list[PrefillChunk]],
        seqs: list[list[Sequence]],
        variant: Variant = PLAIN,
    ) -> DecodeRound:
        """Prefill rows and one decode step of `seqs` in one dispatch.

        Uses the largest buckets only: only long prompts are worth mixing with decode.
        """
        bucket = self.shapes.prefill_buckets[-1]
        prefilled = self._prefill_batch(rows, bucket)
        size = self.shapes.decode_buckets[-1]
        batch = self.decode_batch(seqs, size, variant)
        with self._call():
            self._cache, out = self._programs["mixed"](
                self._flat(params), self.allocated_cache(), prefilled, batch
            )
        return DecodeRound(seqs, batch, out, adjusted=variant.adjusted)

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
            self._cache = self._programs[kind](self.allocated_cache(), sources, targets)

    def decode(
        self,
        params: Tree,
        seqs: list[list[Sequence]],
        bucket: int,
        variant: Variant = PLAIN,
        *,
        n_steps: int,
        exit_at: int,
    ) -> DecodeRound:
        """Up to `n_steps` decode steps, until `exit_at` or fewer sequences of a replica run."""
        batch = self.decode_batch(seqs, bucket, variant)
        with self._call():
            batch = self._with_state(batch, jax.sharding.get_mesh(), _put)
            return self._decode(params, seqs, batch, n_steps, exit_at, variant.adjusted)

    def decode_next(self, params: Tree, last: DecodeRound) -> DecodeRound:
        """Dispatches as many steps after a round that was not read yet, for the same rows.

        Those that have ended in it are padding: the device knows.
        """
        assert last.state is not None
        bucket = len(last.batch.stop_ids) // len(last.seqs)
        tables = decode_tables(last.seqs, bucket, self.shapes)
        batch = last.batch.with_state(last.state)
        batch = dataclasses.replace(batch, page_tables=tables)
        with self._call():
            return self._decode(params, last.seqs, batch, last.n_steps, last.exit_at, last.adjusted)

    def read(self, dispatched: DecodeRound) -> DecodeOutput:
        """Waits for the tokens of a round and copies them to the host."""
        speculative = self.speculation is not None and dispatched.state is not None
        with self._call():
            return read_decode_output(dispatched, speculative=speculative)

    def _with_state(
        self, batch: DecodeBatch, mesh: Mesh, place: Callable[[np.ndarray, NamedSharding], Any]
    ) -> DecodeBatch:
        """The batch with its state placed as the decode program returns it.

        So the first dispatch and those that continue it are one compiled program.
        """

        def placed(array: np.ndarray) -> Any:
            return place(array, NamedSharding(mesh, state_spec(self.pool.rules, array.ndim)))

        return batch.with_state(jax.tree.map(placed, batch.state))

    def _decode(
        self,
        params: Tree,
        seqs: list[list[Sequence]],
        batch: DecodeBatch,
        n_steps: int,
        exit_at: int,
        adjusted: bool,
    ) -> DecodeRound:
        self._cache, out, state = self._programs["decode"](
            self._flat(params),
            self.allocated_cache(),
            batch,
            np.int32(n_steps),
            np.int32(exit_at),
        )
        out.columns.copy_to_host_async()
        return DecodeRound(seqs, batch, out, n_steps, exit_at, state, adjusted)

    def declared(self, *, adjustable: bool) -> list[Dispatch]:
        """Every program of the declared shapes; `adjustable` adds those with adjustments.

        Programs that sample exist without filters, and with them if the engine has any. Those with
        adjustments have the filters, too.
        """
        shapes, filtered = self.shapes, bool(self._filters)
        variants = [PLAIN] + [FILTERED] * filtered + [Variant(True, filtered)] * adjustable
        prefill = [Dispatch("prefill", bucket) for bucket in shapes.prefill_buckets]
        longest = shapes.prefill_buckets[-1]
        mixed = [Dispatch("mixed", longest, v) for v in variants if shapes.mixed]
        decode = [Dispatch("decode", b, v) for v in variants for b in shapes.decode_buckets]
        kinds = COPIES if shapes.states else COPIES[:1]
        copies = [Dispatch(kind, COPIES_PER_CALL) for kind in kinds]
        return [*prefill, *mixed, *copies, *decode]

    def suffices(self, program: Dispatch) -> bool:
        """Whether it is one of the programs that serve every request, if slowly."""
        shapes = self.shapes
        if program.kind == "decode" and program.variant.filtered != bool(self._filters):
            return False  # the program with filters serves requests without any, too
        buckets = {
            "prefill": shapes.prefill_buckets[-1 if shapes.whole_images else 0],
            "copy_pages": COPIES_PER_CALL,
            "copy_states": COPIES_PER_CALL,
            "decode": shapes.decode_buckets[-1],
        }
        return program.bucket == buckets.get(program.kind)

    def run_on_padding(self, params: Tree, program: Dispatch) -> None:
        """Runs a program without rows, which compiles it if it is not compiled yet."""
        (kind, bucket, variant), none = program, self._no_rows
        if kind == "prefill":
            self.prefill(params, none, bucket)
        elif kind == "copy_pages":
            self.copy_pages(none)
        elif kind == "copy_states":
            self.copy_states(none)
        elif kind == "mixed":
            self.read(self.mixed(params, none, none, variant))
        else:
            self.read(self.decode(params, none, bucket, variant, n_steps=0, exit_at=0))

    def lower_largest(
        self, params: Tree, n_pages: int, kind: str, *, adjusted: bool = False
    ) -> jax.stages.Lowered:
        """`lower` of the largest program of a kind; rollouts have no adjustments, judges have."""
        buckets = self.shapes.decode_buckets if kind == "decode" else self.shapes.prefill_buckets
        bucket = COPIES_PER_CALL if kind in COPIES else buckets[-1]
        filtered = bool(self._filters) if adjusted else self._filters_rollouts
        variant = Variant(adjusted, filtered)
        return self.lower(params, n_pages, Dispatch(kind, bucket, variant))

    def lower(self, params: Tree, n_pages: int, program: Dispatch) -> jax.stages.Lowered:
        """Lowers a program.

        For ahead-of-time compilation on the current mesh, with (abstract) parameters and a pool of
        `n_pages` pages.
        """
        mesh = jax.tree.leaves(params)[0].sharding.mesh
        cache = on_mesh(jax.eval_shape(lambda: self.pool.allocate(n_pages)), mesh)
        state = (cache,) if program.kind in COPIES else (params, cache)
        inputs = self._padding(program)
        if program.kind == "decode":
            inputs = self._with_state(inputs[0], mesh, _abstract), *inputs[1:]
        return self._programs[program.kind].lower(*state, *inputs)

    def _padding(self, program: Dispatch) -> tuple[Any, ...]:
        """The inputs of a program without rows."""
        (kind, bucket, variant), none = program, self._no_rows
        if kind in COPIES:
            ids = np.zeros(self.pool.n_replicas * bucket, np.int32)
            by_window = dict.fromkeys(self.shapes.windows, ids)
            return (by_window if kind == "copy_pages" else ids,) * 2
        if kind == "prefill":
            return (self._prefill_batch(none, bucket),)
        if kind == "mixed":
            size = self.shapes.decode_buckets[-1]
            return self._prefill_batch(none, bucket), self.decode_batch(none, size, variant)
        return self.decode_batch(none, bucket, variant), np.int32(0), np.int32(0)

    @property
    def _no_rows(self) -> list[list[Any]]:
        """No rows of any replica of the current mesh."""
        return [[] for _ in range(self.pool.n_replicas)]

    def decode_batch(
        self, seqs: list[list[Sequence]], bucket: int, variant: Variant = PLAIN
    ) -> DecodeBatch:
        filters = self._filters if variant.filtered else ()
        return decode_batch(
            seqs, bucket, self.shapes, self._eos_ids, adjusted=variant.adjusted, filters=filters
        )

    def _prefill_batch(self, rows: list[list[PrefillChunk]], bucket: int) -> PrefillBatch:
        return prefill_batch(pad_replicas(rows, bucket), self.shapes, self._images)

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


def in_calls(copy: Callable, copies: list[list[tuple[int, ...]]]) -> None:
    """Makes the copies of each replica, as many in one call as it takes."""
    for i in range(0, max(map(len, copies)), COPIES_PER_CALL):
        copy([own[i : i + COPIES_PER_CALL] for own in copies])


def _put(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
    return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)


def _abstract(array: np.ndarray, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
