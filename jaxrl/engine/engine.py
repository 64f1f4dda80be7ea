"""The paged, continuously batching engine: a pool of KV pages and four compiled programs."""

import contextlib
import logging
import time
from collections.abc import Iterator
from typing import Any, TypeVar

import jax
import numpy as np
from jax.typing import DTypeLike

from jaxrl.config.keys import RolloutConfig
from jaxrl.engine import programs
from jaxrl.engine.api import EngineStats, Generated, Prefix, Request
from jaxrl.engine.batches import N_STOP, cut, decode_arrays, fill_arrays, stop_ids
from jaxrl.engine.buckets import batch_buckets, prefill_buckets
from jaxrl.engine.pages import PagePool
from jaxrl.engine.replicas import Replicas
from jaxrl.engine.rows import DecodeRows
from jaxrl.engine.scheduler import Fill, Plan, Scheduler, Sequence
from jaxrl.engine.speculative import Drafts, Made, read_made
from jaxrl.models.cache import KVCache, init_cache, page_bytes, page_dtype
from jaxrl.models.config import DecoderConfig
from jaxrl.types import Tree
from sharding import Rules, hosts, on_mesh

T = TypeVar("T")
log = logging.getLogger(__name__)

COPY_ROWS = 16  # pages copied by one call
PREFILL_LEN = 64  # tokens of one prefill row, a multiple of page_len where pages are longer


class PagedEngine:
    """Implements `api.Engine`.

    Parameters come with every call and are neither kept nor copied. The pool lies in device memory
    from the first call to `release()`; pages, queues and the state of sequences lie on the host.
    Shapes come from declared buckets, all compiled by `warmup`.
    """

    def __init__(
        self,
        cfg: DecoderConfig,
        rollout: RolloutConfig,
        *,
        rules: Rules,
        dtype: DTypeLike,
        max_len: int,
        eos_ids: tuple[int, ...] = (),
        implementation: str | None = None,
    ):
        """`max_len` bounds prompt plus response, `dtype` is the model's, `eos_ids` end a response
        beside the stop_token_ids of each request. Raises ValueError for limits that cannot work."""
        _check(rollout, cfg, max_len)
        self.cfg, self.rollout, self.rules = cfg, rollout, rules
        self.max_len, self.eos_ids = max_len, tuple(eos_ids)
        self.implementation = implementation
        self._how: dict[str, Any] = {"rules": rules, "implementation": implementation}
        self.kv_dtype = page_dtype(rollout.kv_dtype, dtype)
        self.row_len = max(rollout.page_len, PREFILL_LEN // rollout.page_len * rollout.page_len)
        self.n_columns = -(-max_len // rollout.page_len)
        n_drafts = rollout.spec_tokens
        self.drafts = Drafts(n_drafts, rollout.spec_ngram) if n_drafts else None
        self.batch_buckets = batch_buckets(rollout.max_num_seqs)
        self.prefill_buckets = prefill_buckets(rollout.max_num_batched_tokens // self.row_len)
        self._cache: KVCache | None = None
        self._scheduler: Replicas | None = None
        self._stats = EngineStats()
        self._shapes: set[tuple[str, int]] = set()

    # The verbs

    def set_version(self, version: int) -> None:
        self.scheduler.set_version(version)

    def prefill(self, params: Tree, tokens: np.ndarray) -> Prefix:
        prefix, plans = self.scheduler.prefill(tokens)
        self._prepare(params, plans)
        return prefix

    def release_prefix(self, prefix: Prefix) -> None:
        self.scheduler.release_prefix(prefix)

    def insert(self, prefix: Prefix, request: Request) -> int:
        self._check_stop_ids(request)
        slot, plans = self.scheduler.insert(prefix, request)
        self._copy([plan.copies for plan in plans])
        return slot

    def submit(self, request: Request) -> int:
        self._check_stop_ids(request)
        return self.scheduler.submit(request)

    def generate(self, params: Tree) -> list[Generated]:
        start, device_s = time.perf_counter(), self._stats.device_s
        plans = self.scheduler.plan()
        if any(plan.full for plan in plans):
            seqs = [plan.going for plan in plans]
            made = self._prepare_beside(params, plans)
        else:
            seqs = [plan.decode for plan in plans]
            self._prepare(params, plans)
            if not any(seqs):
                return []
            made = self._decode(params, plans)
        generated = self._advance(seqs, made)
        device_s = self._stats.device_s - device_s
        self._stats.host_s += time.perf_counter() - start - device_s
        return generated

    def free(self, slot: int) -> None:
        self.scheduler.free(slot)

    @property
    def n_unfinished(self) -> int:
        return self.scheduler.n_unfinished

    def take_stats(self) -> EngineStats:
        scheduler, stats = self.scheduler, self._stats
        stats.n_preempted = scheduler.take("n_preempted")
        stats.n_shared_tokens = scheduler.take("n_shared_tokens")
        self._stats = EngineStats()
        return stats

    # Life

    def warmup(self, params: Tree) -> int:
        """Compiles the programs of all buckets by running each on padding. Returns their number."""
        for n in self.prefill_buckets:
            self._fill_rows(params, [], n)
        if self.mixes:
            self._mixed_rows(params, [], [])
        self._copy_rows([])
        for n in self.batch_buckets:
            self._decode_rows(params, [], n, n_steps=0, leave_at=0)
        jax.block_until_ready(self._cache)
        return self.n_programs

    def lower(self, params: Tree, n_pages: int, kind: str) -> jax.stages.Lowered:
        """The largest program of a kind (prefill, mixed, copy_pages, decode) for (abstract) parameters and a pool of
        `n_pages`, to compile ahead of the first call; the mesh is the one that is set."""
        mesh = jax.tree.leaves(params)[0].sharding.mesh
        cache = on_mesh(jax.eval_shape(lambda: self._new_pool(n_pages)), mesh)
        if kind == "copy_pages":
            pairs = np.zeros(self.n_replicas * COPY_ROWS, np.int32)
            how = {"rules": self.rules, "stacked": self.cfg.stacked}
            return programs.copy_pages.lower(cache, pairs, pairs, **how)
        fills = self._fill_arrays([], self.prefill_buckets[-1])
        if kind == "prefill":
            return programs.prefill.lower(params, cache, *fills, **self._how)
        rows = self._rows([], self.batch_buckets[-1])
        if kind == "mixed":
            return programs.mixed.lower(params, cache, *fills, rows, **self._how)
        loop = {"max_steps": self.rollout.steps_per_dispatch, "drafts": self.drafts}
        none = np.int32(0)
        return programs.decode.lower(params, cache, rows, none, none, **loop, **self._how)

    @property
    def n_programs(self) -> int:
        """Programs compiled so far: it stops growing after `warmup`."""
        return len(self._shapes)

    @property
    def mixes(self) -> bool:
        """Whether prompts may be computed beside a step: those of all slots together fill a dispatch, and are found
        where a part of them is computed first."""
        rows = self.rollout.max_num_seqs * -(-(self.max_len - 1) // self.row_len)
        return self.rollout.prefix_cache and rows >= self.prefill_buckets[-1]

    @property
    def n_replicas(self) -> int:
        """Replicas on the mesh that is set, each with max_num_seqs slots and a pool of n_pages."""
        return self.rules.n_shards("batch")

    @property
    def scheduler(self) -> Replicas:
        if self._scheduler is None:
            rollout, n_pages = self.rollout, self._n_pages()
            self._scheduler = Replicas(
                lambda: Scheduler(
                    PagePool(n_pages, rollout.page_len, keep=rollout.prefix_cache),
                    max_num_seqs=rollout.max_num_seqs,
                    steps_per_dispatch=rollout.steps_per_dispatch * (1 + rollout.spec_tokens),
                    max_len=self.max_len,
                    row_len=self.row_len,
                    rows_per_dispatch=self.prefill_buckets[-1],
                ),
                self.n_replicas,
            )
        return self._scheduler

    def release(self) -> None:
        """Ends all slots and prefixes and frees the pool's memory; the next call allocates it anew."""
        self._cache = self._scheduler = None

    @property
    def pool_bytes(self) -> int:
        """Bytes of the pools of all replicas."""
        page = page_bytes(self.cfg, self.rollout.page_len, self.kv_dtype)
        return self.n_replicas * self.scheduler.pool.n_pages * page

    @property
    def page_bytes_per_device(self) -> int:
        """Bytes that one device of the mesh that is set holds of a page."""
        page = page_bytes(self.cfg, self.rollout.page_len, self.kv_dtype)
        return page // self.rules.n_shards("kv_heads")

    def _n_pages(self) -> int:
        """As configured; else what max_num_seqs longest sequences need, or as much of it as the
        device's memory has left below memory_utilization."""
        cfg = self.rollout
        if cfg.n_pages:
            return cfg.n_pages
        wanted = cfg.max_num_seqs * self.n_columns
        page = self.page_bytes_per_device
        fits = wanted
        for device in jax.local_devices():
            memory = device.memory_stats()
            if memory and "bytes_limit" in memory:
                left = cfg.memory_utilization * memory["bytes_limit"] - memory["bytes_in_use"]
                fits = min(fits, int(left // page))
        if jax.sharding.get_mesh().is_multi_process:  # all processes schedule the same pages
            fits = min(hosts.gather(fits))
        if fits < self.n_columns:
            raise ValueError(
                f"device memory has room for {max(fits, 0)} KV pages, one sequence of {self.max_len} tokens "
                f"needs {self.n_columns}; raise config.rollout.memory_utilization ({cfg.memory_utilization}) "
                "or lower the maximal lengths"
            )
        if fits < wanted:
            log.info("KV pool: %d pages of the %d that max_num_seqs could fill", fits, wanted)
        return fits

    # Device calls

    def _pool(self) -> KVCache:
        if self._cache is None:
            self._cache = self._new_pool(self.scheduler.pool.n_pages)
        return self._cache

    def _new_pool(self, n_pages: int) -> KVCache:
        return init_cache(self.cfg, n_pages, self.rollout.page_len, self.kv_dtype, self.rules)

    @contextlib.contextmanager
    def _on_device(self) -> Iterator[None]:
        """Times a call of a program. Where it fails the donated pool is gone or half written, so
        everything that lies in it ends."""
        start = time.perf_counter()
        try:
            yield
        except BaseException:
            self.release()
            raise
        finally:
            self._stats.device_s += time.perf_counter() - start

    def _prepare(self, params: Tree, plans: list[Plan]) -> None:
        """Brings the keys that sequences start with into their pages."""
        self._copy([plan.copies for plan in plans])
        rows = self._fills(plans)
        while most := max(map(len, rows)):
            fitting = [b for b in self.prefill_buckets if b <= most]
            bucket = max(fitting, default=self.prefill_buckets[0])
            self._fill_rows(params, [own[:bucket] for own in rows], bucket)
            rows = [own[bucket:] for own in rows]
        self._copy([plan.late_copies for plan in plans])

    def _prepare_beside(self, params: Tree, plans: list[Plan]) -> Made:
        """`_prepare` of plans of which one is full, and a step of the sequences that ran before, in one dispatch."""
        self._copy([plan.copies for plan in plans])
        out = self._mixed_rows(params, self._fills(plans), [plan.going for plan in plans])
        self._copy([plan.late_copies for plan in plans])
        return read_made(out, None)

    def _fills(self, plans: list[Plan]) -> list[list[Fill]]:
        """The rows of each replica."""
        rows = [cut(plan.fills, self.row_len) for plan in plans]
        self._stats.n_prefill_tokens += sum(len(row.tokens) for own in rows for row in own)
        return rows

    def _fill_rows(self, params: Tree, fills: list[list[Fill]], bucket: int) -> None:
        arrays = self._fill_arrays(fills, bucket)
        self._shapes.add(("prefill", bucket))
        with self._on_device():
            self._cache = programs.prefill(params, self._pool(), *arrays, **self._how)

    def _mixed_rows(
        self, params: Tree, fills: list[list[Fill]], seqs: list[list[Sequence]]
    ) -> np.ndarray:
        """In the largest buckets: it is the long prompts that others would wait for."""
        arrays = self._fill_arrays(fills, self.prefill_buckets[-1])
        rows = self._rows(seqs, self.batch_buckets[-1])
        self._shapes.add(("mixed", self.prefill_buckets[-1]))
        with self._on_device():
            self._cache, out = programs.mixed(params, self._pool(), *arrays, rows, **self._how)
            return np.asarray(out)

    def _fill_arrays(self, fills: list[list[Fill]], bucket: int) -> tuple[np.ndarray, ...]:
        return fill_arrays(self._in_bucket(fills, bucket), self.row_len, self.n_columns)

    def _copy(self, copies: list[list[tuple[int, int]]]) -> None:
        for i in range(0, max(map(len, copies)), COPY_ROWS):
            self._copy_rows([own[i : i + COPY_ROWS] for own in copies])

    def _copy_rows(self, copies: list[list[tuple[int, int]]]) -> None:
        padding = (0, self.scheduler.pool.n_pages)
        rows = self._in_bucket(copies, COPY_ROWS)
        pairs = np.array([row or padding for row in rows], np.int32).T
        self._shapes.add(("copy", COPY_ROWS))
        with self._on_device():
            self._cache = programs.copy_pages(
                self._pool(), pairs[0], pairs[1], rules=self.rules, stacked=self.cfg.stacked
            )

    def _decode(self, params: Tree, plans: list[Plan]) -> Made:
        seqs = [plan.decode for plan in plans]
        n_steps = min(plan.n_steps for plan in plans if plan.decode)
        n = max(map(len, seqs))
        bucket = min(b for b in self.batch_buckets if b >= n)
        smaller = [b for b in self.batch_buckets if b < n]
        # Leave the loop when a smaller batch would do, or when ended sequences make room for others.
        leave_at = max(smaller, default=0)
        if self.scheduler.n_waiting:
            leave_at = n - max(1, n // 32)
        return read_made(self._decode_rows(params, seqs, bucket, n_steps, leave_at), self.drafts)

    def _decode_rows(
        self, params: Tree, seqs: list[list[Sequence]], bucket: int, n_steps: int, leave_at: int
    ) -> np.ndarray:
        rows = self._rows(seqs, bucket)
        self._shapes.add(("decode", bucket))
        with self._on_device():
            self._cache, out = programs.decode(
                params,
                self._pool(),
                rows,
                np.int32(n_steps),
                np.int32(leave_at),
                max_steps=self.rollout.steps_per_dispatch,
                drafts=self.drafts,
                **self._how,
            )
            return np.asarray(out)

    def _rows(self, seqs: list[list[Sequence]], bucket: int) -> DecodeRows:
        history_len = self.n_columns * self.rollout.page_len if self.drafts else 0
        rows = self._in_bucket(seqs, bucket)
        return decode_arrays(rows, self.n_columns, self.eos_ids, history_len=history_len)

    def _in_bucket(self, by_replica: list[list[T]], bucket: int) -> list[T | None]:
        """The rows of a dispatch: `bucket` of each replica, padded with None."""
        every = by_replica or [[]] * self.n_replicas
        return [own[i] if i < len(own) else None for own in every for i in range(bucket)]

    # Results

    def _advance(self, seqs: list[list[Sequence]], made: Made) -> list[Generated]:
        self._count(seqs, made)
        tokens, bits = made.tokens.reshape(2, len(seqs), -1, made.tokens.shape[2])
        generated = []
        for r, b, seq in [(r, b, seq) for r, own in enumerate(seqs) for b, seq in enumerate(own)]:
            n_new = int((tokens[r, b] >= 0).sum())
            new, request = tokens[r, b, :n_new].copy(), seq.request
            finish = "length" if n_new == seq.remaining else ""
            if not request.ignore_stop and new[-1] in stop_ids(request, self.eos_ids):
                finish = "stop"
            slot = self.scheduler.advance(r, seq, new.tolist(), finish)
            logp = bits[r, b, :n_new].view(np.float32).copy()
            generated.append(Generated(slot, new, logp, finish))
        return generated

    def _count(self, seqs: list[list[Sequence]], made: Made) -> None:
        stats, used = self._stats, self.scheduler.n_pages_used / self.scheduler.n_pages
        steps = made.n_steps
        stats.n_dispatches += 1
        stats.n_steps += steps
        stats.n_tokens += made.n_tokens
        stats.n_rows += made.tokens.shape[1] * steps
        stats.n_drafted += made.n_drafted
        stats.n_accepted += made.n_accepted
        stats.running += sum(map(len, seqs)) * steps
        stats.waiting += self.scheduler.n_waiting * steps
        stats.cache_used += used * steps
        stats.cache_used_max = max(stats.cache_used_max, used)

    def _check_stop_ids(self, request: Request) -> None:
        if (n := len(stop_ids(request, self.eos_ids))) > N_STOP:
            raise ValueError(
                f"{n} stop token ids (end-of-sequence ids included), at most {N_STOP} are possible; "
                "shorten config.rollout.sampling.stop_token_ids"
            )


def _check(rollout: RolloutConfig, cfg: DecoderConfig, max_len: int) -> None:
    if max_len > cfg.max_len:
        raise ValueError(
            f"prompt and response may take {max_len} tokens, the model was made for {cfg.max_len}; "
            "lower config.data.max_prompt_len or config.data.max_response_len"
        )
    for name in ("max_num_seqs", "max_num_batched_tokens", "page_len", "steps_per_dispatch"):
        if (value := getattr(rollout, name)) < 1:
            raise ValueError(f"config.rollout.{name} is {value}; set it to 1 or more")
