"""Runs the compiled programs on the device: fills their arrays, owns and donates the KV cache."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl.config.keys import RolloutConfig
from jaxrl.engine.device import programs
from jaxrl.engine.device.batches import DispatchShapes, decode_batch, pad_replicas, prefill_batch
from jaxrl.engine.device.decode_loop import DecodeBatch, DecodeOutput, read_decode_output
from jaxrl.engine.device.kv_pool import KVPoolSpec
from jaxrl.engine.device.programs import PrefillBatch
from jaxrl.engine.device.speculative import SpeculationConfig
from jaxrl.engine.work import PageCopy, PrefillChunk, Sequence, StateCopy
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
        n_pages: Callable[[], int],
        on_failure: Callable[[], None],
    ):
        """`n_pages` gives the size of each replica's pool when the cache is allocated.

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
            "copy_pages": {"rules": pool.rules, "stacked": pool.cfg.stacked},
            "copy_states": {"rules": pool.rules, "stacked": pool.cfg.stacked},
            "decode": samples | decodes,
        }
        self.cache: KVCache | None = None
        self.device_s = 0.0  # wall time of program calls
        self.dispatched: set[tuple[str, int]] = set()  # (program, bucket)
        self._eos_ids = eos_ids
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
        with self._call("prefill", bucket):
            cache = self.allocated_cache()
            self.cache = programs.prefill(params, cache, prefilled, **self._static["prefill"])

    def mixed(
        self,
        params: Tree,
        rows: list[list[PrefillChunk]],
        seqs: list[list[Sequence]],
        *,
        adjusted: bool = False,
    ) -> DecodeOutput:
        """Prefill rows and one decode step of `seqs` in one dispatch.

        Uses the largest buckets only: only long prompts are worth mixing with decode. `adjusted`
        selects the program with adjustments.
        """
        bucket = self.shapes.prefill_buckets[-1]
        prefilled = self._prefill_batch(rows, bucket)
        batch = self.decode_batch(seqs, self.shapes.decode_buckets[-1], adjusted=adjusted)
        with self._call("mixed adjusted" if adjusted else "mixed", bucket):
            self.cache, out = programs.mixed(
                params, self.allocated_cache(), prefilled, batch, **self._static["mixed"]
            )
            return read_decode_output(out, filtered=_filtered(seqs), with_top=_with_top(seqs))

    def copy_pages(self, copies: list[list[PageCopy]]) -> None:
        """Copies up to COPIES_PER_CALL pages of each replica."""
        self._copy("copy_pages", copies, padding=(0, self._n_pages()))

    def copy_states(self, copies: list[list[StateCopy]]) -> None:
        """Copies up to COPIES_PER_CALL states of each replica."""
        self._copy("copy_states", copies, padding=(0, 0))

    def _copy(
        self,
        kind: str,
        copies: list[list[PageCopy]] | list[list[StateCopy]],
        *,
        padding: tuple[int, int],
    ) -> None:
        rows = pad_replicas(copies, COPIES_PER_CALL, self.pool.n_replicas)
        pairs = np.array([row or padding for row in rows], np.int32).T
        with self._call(kind, COPIES_PER_CALL):
            cache = self.allocated_cache()
            self.cache = getattr(programs, kind)(cache, *pairs, **self._static[kind])

    def decode(
        self,
        params: Tree,
        seqs: list[list[Sequence]],
        bucket: int,
        *,
        n_steps: int,
        exit_at: int,
        adjusted: bool = False,
    ) -> DecodeOutput:
        """Up to `n_steps` decode steps, until `exit_at` or fewer sequences of a replica run.

        `adjusted` selects the program with adjustments.
        """
        batch = self.decode_batch(seqs, bucket, adjusted=adjusted)
        with self._call("decode adjusted" if adjusted else "decode", bucket):
            self.cache, out = programs.decode(
                params,
                self.allocated_cache(),
                batch,
                np.int32(n_steps),
                np.int32(exit_at),
                **self._static["decode"],
            )
            return read_decode_output(
                out,
                filtered=_filtered(seqs),
                with_top=_with_top(seqs),
                speculative=self.speculation is not None,
            )

    def declared(self, *, adjustable: bool) -> list[Dispatch]:
        """Every program of the declared shapes; `adjustable` adds those with adjustments."""
        shapes = self.shapes
        variants = (False, True) if adjustable else (False,)
        prefill = [Dispatch("prefill", bucket) for bucket in shapes.prefill_buckets]
        mixed = [Dispatch("mixed", shapes.prefill_buckets[-1], v) for v in variants if shapes.mixed]
        decode = [Dispatch("decode", b, v) for v in variants for b in shapes.decode_buckets]
        kinds = COPIES if shapes.states else COPIES[:1]
        copies = [Dispatch(kind, COPIES_PER_CALL) for kind in kinds]
        return [*prefill, *mixed, *copies, *decode]

    def run_on_padding(self, params: Tree, program: Dispatch) -> None:
        """Runs a program without rows, which compiles it if it is not compiled yet."""
        kind, bucket, adjusted = program
        if kind == "prefill":
            self.prefill(params, [], bucket)
        elif kind == "copy_pages":
            self.copy_pages([])
        elif kind == "copy_states":
            self.copy_states([])
        elif kind == "mixed":
            self.mixed(params, [], [], adjusted=adjusted)
        else:
            self.decode(params, [], bucket, n_steps=0, exit_at=0, adjusted=adjusted)

    def lower_largest(self, params: Tree, n_pages: int, kind: str) -> jax.stages.Lowered:
        """`lower` of the largest program of a kind, without adjustments."""
        buckets = self.shapes.decode_buckets if kind == "decode" else self.shapes.prefill_buckets
        bucket = COPIES_PER_CALL if kind in COPIES else buckets[-1]
        return self.lower(params, n_pages, Dispatch(kind, bucket))

    def lower(self, params: Tree, n_pages: int, program: Dispatch) -> jax.stages.Lowered:
        """Lowers a program.

        For ahead-of-time compilation on the current mesh, with (abstract) parameters and a pool of
        `n_pages` pages.
        """
        mesh = jax.tree.leaves(params)[0].sharding.mesh
        cache = on_mesh(jax.eval_shape(lambda: self.pool.allocate(n_pages)), mesh)
        state = (cache,) if program.kind in COPIES else (params, cache)
        jitted = getattr(programs, program.kind)
        return jitted.lower(*state, *self._padding(program), **self._static[program.kind])

    def _padding(self, program: Dispatch) -> tuple[Any, ...]:
        """The inputs of a program without rows."""
        kind, bucket, adjusted = program
        if kind in COPIES:
            return (np.zeros(self.pool.n_replicas * bucket, np.int32),) * 2
        if kind == "prefill":
            return (self._prefill_batch([], bucket),)
        if kind == "mixed":
            batch = self.decode_batch([], self.shapes.decode_buckets[-1], adjusted=adjusted)
            return self._prefill_batch([], bucket), batch
        return self.decode_batch([], bucket, adjusted=adjusted), np.int32(0), np.int32(0)

    def decode_batch(
        self, seqs: list[list[Sequence]], bucket: int, *, adjusted: bool = False
    ) -> DecodeBatch:
        rows = pad_replicas(seqs, bucket, self.pool.n_replicas)
        return decode_batch(rows, self.shapes, self._eos_ids, adjusted=adjusted)

    def _prefill_batch(self, rows: list[list[PrefillChunk]], bucket: int) -> PrefillBatch:
        return prefill_batch(pad_replicas(rows, bucket, self.pool.n_replicas), self.shapes)

    @contextlib.contextmanager
    def _call(self, program: str, bucket: int) -> Iterator[None]:
        """Times a program call. If it fails, the donated cache is lost, with everything in it."""
        self.dispatched.add((program, bucket))
        start = time.perf_counter()
        try:
            yield
        except BaseException:
            self.release()
            self._on_failure()
            raise
        finally:
            self.device_s += time.perf_counter() - start


def _filtered(seqs: list[list[Sequence]]) -> bool:
    """Whether a sequence samples from a truncated distribution."""
    return any(seq.request.sampling.filters for own in seqs for seq in own)


def _with_top(seqs: list[list[Sequence]]) -> bool:
    """Whether a sequence wants the most likely tokens."""
    return any(seq.request.top_logprobs for own in seqs for seq in own)
