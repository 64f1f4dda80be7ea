"""The paged engine with continuous batching: scheduling rounds over a model runner."""

import dataclasses
import functools
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

from jaxrl.config.keys import RolloutConfig
from jaxrl.engine.api import EngineStats, Generated, Prefix, Request
from jaxrl.engine.device.batches import (
    adjusted_rows,
    check_limits,
    check_request,
    dispatch_shapes,
    exit_size,
)
from jaxrl.engine.device.decode_loop import DecodeOutput, DecodeRound
from jaxrl.engine.device.kv_pool import KVPoolSpec, n_state_slots, window_page_counts
from jaxrl.engine.device.model_runner import PLAIN, Dispatch, ModelRunner, Variant, in_calls
from jaxrl.engine.device.prefill_rows import prefill_calls, split_rows
from jaxrl.engine.images import ImageSettings, ImageTable
from jaxrl.engine.pages import PagePool
from jaxrl.engine.prefill import PrefillChunk, PrefillWork
from jaxrl.engine.replicas import ReplicaScheduler
from jaxrl.engine.scheduler import DispatchPlan, Scheduler
from jaxrl.engine.sequence import Sequence
from jaxrl.engine.states import StateSlots
from jaxrl.engine.windows import WindowPages
from jaxrl.models.config import DecoderConfig
from jaxrl.models.kv_cache import page_dtype
from jaxrl.models.router_replay import routing_shape
from jaxrl.runtime.compilation import CompileThreads, compile_in_threads
from jaxrl.types import Tree
from sharding import Rules, needs_trial_run


class PagedEngine:
    """A `RequestEngine` on local devices, with prefixes that several sequences may share.

    Parameters come with every call and are neither kept nor copied. The KV cache stays in device
    memory from the first call to `release()`; page tables, queues and sequence state are on the
    host. Shapes come from declared buckets, all compiled by `warmup`.
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
        keep_support: bool = False,
        keep_experts: bool = False,
        filters: tuple[str, ...] = (),
        adjustable: bool = False,
        images: ImageSettings | None = None,
    ):
        """`max_len` limits prompt plus response, `dtype` is the model's compute dtype.

        `eos_ids` end a response in addition to the stop_token_ids of each request. `keep_support`
        returns the tokens that sampling filters keep, for one bit per token of the vocabulary and
        sampled token on the device, `keep_experts` the experts that sampled each token. `filters`
        are the sampling filters that requests may have, by their config keys; with any, `warmup`
        compiles a second variant of the decode programs for batches in which a request has one.
        `adjustable` accepts requests with adjustments and top logprobs, with another variant.
        `images` accepts requests with images; its programs are then made for them.
        Raises ValueError for invalid limits.
        """
        check_limits(rollout, cfg, max_len)
        self.cfg, self.rollout = cfg, rollout
        self.max_len, self.eos_ids = max_len, tuple(eos_ids)
        self.keep_support, self.filters, self.adjustable = keep_support, filters, adjustable
        self._accepts: dict[str, Any] = dict(adjustable=adjustable, filters=filters, images=images)
        self.routing = routing_shape(cfg) if keep_experts else None
        self.pool = KVPoolSpec(
            cfg,
            rollout.page_len,
            page_dtype(rollout.kv_dtype, dtype),
            rules,
            window_page_counts(cfg, rollout, max_len),
            rollout.max_num_seqs,
            -(-max_len // rollout.page_len),
            n_slots=n_state_slots(cfg, rollout),
            tail_dtype=dtype,
        )
        self.shapes = dispatch_shapes(rollout, max_len, cfg, images)
        self.images = None if images is None else ImageTable(images, self.shapes.prefill_len)
        self.runner = ModelRunner(
            self.pool,
            self.shapes,
            rollout,
            eos_ids=self.eos_ids,
            implementation=implementation,
            keep_support=keep_support,
            keep_experts=keep_experts,
            filters=filters,
            images=self.images,
            n_pages=lambda: self.scheduler.pool.n_pages,
            on_failure=self.release,
        )
        self._scheduler: ReplicaScheduler | None = None
        self._n_pages = 0  # of each replica; 0 until the first allocation
        self._pending: set[Dispatch] = set()  # programs that dispatches must not use yet
        self._ahead: DecodeRound | None = None  # dispatched, not read
        self._generated: list[Generated] = []  # read, not returned
        self._stats = EngineStats()

    def set_version(self, version: int) -> None:
        if version != self.scheduler.version and self._ahead is not None:
            if self.pool.n_slots:  # states are ahead of the tokens, and cannot go back
                self._generated += self._read(self._ahead)
            self._ahead = None  # KV is written again
        self.scheduler.set_version(version)

    def prefill(self, params: Tree, tokens: np.ndarray, adapter: int = 0) -> Prefix:
        """Computes the KV of a prompt with an adapter.

        The handle keeps its pages until `release_prefix`.
        """
        prefix, work = self.scheduler.prefill(tokens, adapter)
        self._prefill(params, work)
        return prefix

    def release_prefix(self, prefix: Prefix) -> None:
        self.scheduler.release_prefix(prefix)

    def insert(self, prefix: Prefix, request: Request) -> int:
        """Starts a sequence from a prefix, which has no images. Returns its slot."""
        if request.images:
            raise ValueError("a prefix has no images; submit the request instead")
        self._check(request)
        slot, work = self.scheduler.insert(prefix, request)
        self._copy(work)
        return slot

    def submit(self, request: Request) -> int:
        self._check(request)
        if self.images is None:
            return self.scheduler.submit(request)
        return self.images.submit(request, self.scheduler.submit)

    def _check(self, request: Request) -> None:
        check_request(request, self.cfg, self.eos_ids, **self._accepts)

    def generate(self, params: Tree) -> list[Generated]:
        """One round. The next one is dispatched before it is read, where that changes no result."""
        if self._generated:
            generated, self._generated = self._generated, []
            return generated
        start, device_s = time.perf_counter(), self.runner.device_s
        generated = self._round(params)
        device_s = self.runner.device_s - device_s
        self._stats.host_s += time.perf_counter() - start - device_s
        return generated

    def free(self, slot: int) -> None:
        read = [one for one in self._generated if one.slot == slot]
        self._generated = [one for one in self._generated if one.slot != slot]
        if not any(one.finish for one in read):
            self.scheduler.free(slot)
            if self.images is not None:
                self.images.remove(slot)

    @property
    def n_unfinished(self) -> int:
        return self.scheduler.n_unfinished + sum(bool(one.finish) for one in self._generated)

    def take_stats(self) -> EngineStats:
        stats = dataclasses.replace(
            self._stats,
            n_preempted=self.scheduler.take_counter("n_preempted"),
            n_cached_tokens=self.scheduler.take_counter("n_cached_tokens"),
            device_s=self.runner.device_s,
        )
        self._stats, self.runner.device_s = EngineStats(), 0.0
        return stats

    # Lifecycle

    def warmup(self, params: Tree, threads: CompileThreads | None = None) -> int:
        """Compiles the programs of all buckets. Returns their number.

        Those that `threads` already compile are waited for, too. On accelerators each runs once on
        padding.
        """
        if threads is None:
            with CompileThreads() as threads:
                return self.warmup(params, threads)
        threads.add(self.lowered(params))
        threads.wait()
        declared = self.runner.declared(adjustable=self.adjustable)
        self._try_out(params, declared)
        return len(declared)

    def warmup_first(self, params: Tree) -> None:
        """As `warmup`, but of the programs that suffice for every request only.

        The others are pending: dispatches use a larger decode batch or several smaller ones of
        prefill until `compile_pending`, in another thread, has compiled them.
        """
        declared = self.runner.declared(adjustable=self.adjustable)
        first = [program for program in declared if self.runner.suffices(program)]
        self._pending = set(declared) - set(first)
        compile_in_threads(self._lowered(params, first))
        self._try_out(params, first)

    def _try_out(self, params: Tree, programs: list[Dispatch]) -> None:
        """Allocates the KV cache; runs each program on padding where that is of use."""
        self.allocate()
        for program in programs if needs_trial_run() else ():
            self.runner.run_on_padding(params, program)
        jax.block_until_ready(self.runner.cache)

    def compile_pending(self, params: Tree, threads: CompileThreads) -> None:
        """Compiles the pending programs, lowered from (abstract) parameters, the smallest first."""
        declared = self.runner.declared(adjustable=self.adjustable)
        for program in [program for program in declared if program in self._pending]:
            done = functools.partial(self._pending.discard, program)
            threads.add(self._lowered(params, [program]), done)

    def _ready(self, kind: str, buckets: tuple[int, ...], variant: Variant = PLAIN) -> list[int]:
        """The buckets of a kind whose programs are not pending."""
        return [b for b in buckets if Dispatch(kind, b, variant) not in self._pending]

    def _variant(self, seqs: list[list[Sequence]]) -> Variant:
        """The variant of the sampling programs that the sequences need."""
        adjusted = adjusted_rows(seqs)
        filters = (seq.request.sampling.filters for own in seqs for seq in own)
        filtered = adjusted or any(filters)
        # The largest program without filters is the last of its variant to be compiled.
        filtered |= not self._ready("decode", self.shapes.decode_buckets[-1:])
        return Variant(adjusted, filtered and bool(self.filters))

    def lowered(self, params: Tree) -> Iterator[jax.stages.Lowered]:
        """The programs of `warmup`, lowered one by one from (abstract) parameters."""
        return self._lowered(params, self.runner.declared(adjustable=self.adjustable)[::-1])

    def _lowered(self, params: Tree, programs: list[Dispatch]) -> Iterator[jax.stages.Lowered]:
        n_pages = self._n_pages or self.scheduler.pool.n_pages
        for program in programs:
            yield self.runner.lower(params, n_pages, program)

    def set_pool_size(self) -> bool:
        """Sets the number of KV pages. False if it depends on the memory that the weights leave.

        Processes that share the engine call this together.
        """
        known = bool(self.rollout.n_pages) or not self.pool.fills_memory
        return known and self.scheduler.pool.n_pages > 0

    def allocate(self) -> None:
        """Allocates the KV cache, if there is none, on the current mesh."""
        jax.block_until_ready(self.runner.allocated_cache())

    def release(self) -> None:
        """Ends all slots and prefixes and frees the KV cache; the next call allocates it again."""
        self.runner.release()
        self._scheduler = self._ahead = None
        self._generated = []
        if self.images is not None:
            self.images.clear()

    @property
    def scheduler(self) -> ReplicaScheduler:
        """The schedulers of the replicas on the current mesh."""
        if self._scheduler is None:
            # The same number after every release: programs are compiled for it.
            self._n_pages = self._n_pages or self.pool.n_pages(self.rollout, max_len=self.max_len)
            self._scheduler = ReplicaScheduler(
                [self._new_scheduler(self._n_pages) for _ in range(self.pool.n_replicas)]
            )
        return self._scheduler

    def _new_scheduler(self, n_pages: int) -> Scheduler:
        rollout, n_slots = self.rollout, self.pool.n_slots
        windows = [
            WindowPages(n, rollout.page_len, window)
            for window, n in self.pool.window_pages(n_pages).items()
        ]
        return Scheduler(
            PagePool(n_pages, rollout.page_len, keep=rollout.prefix_cache, windows=windows),
            max_num_seqs=rollout.max_num_seqs,
            steps_per_dispatch=rollout.steps_per_dispatch * (1 + rollout.spec_tokens),
            max_len=self.max_len,
            row_len=self.shapes.prefill_row_len,
            rows_per_dispatch=self.shapes.prefill_buckets[-1],
            states=StateSlots(n_slots) if n_slots else None,
            images=self.images,
        )

    # Dispatches

    def _round(self, params: Tree) -> list[Generated]:
        """The tokens of the round that is ahead, or of a new one; dispatches the one after it."""
        current, self._ahead = self._ahead, None
        if current is not None and current.n_running <= current.exit_at:
            # It made no steps, unless sequences that were cancelled since then ran in it.
            if generated := self._read(current):
                return generated
            current = None
        if current is None:
            current = self._dispatch(params)
        if current is None:
            return []
        ahead = self._dispatch_next(params, current)
        generated = self._read(current)
        if ahead is not None and ahead.n_running:
            self._ahead = ahead
        return generated

    def _dispatch(self, params: Tree) -> DecodeRound | None:
        """Dispatches the next plan; None if no sequence decodes."""
        plans = self.scheduler.plan()
        if any(plan.full for plan in plans):
            return self._mixed(params, plans)
        seqs = [plan.decode for plan in plans]
        self._prefill(params, [plan.prefill for plan in plans])
        if not any(seqs):
            return None
        return self._decode(params, seqs, min(plan.n_steps for plan in plans if plan.decode))

    def _dispatch_next(self, params: Tree, last: DecodeRound) -> DecodeRound | None:
        """Dispatches the round after one that was not read yet; None if that must be read first.

        The host must see tokens before it knows a grammar's next tokens, a stop string, or that
        waiting sequences start. Supports take too much memory for two rounds.
        """
        most = self.rollout.steps_per_dispatch * (1 + self.rollout.spec_tokens)
        if last.state is None or last.n_steps < most or last.adjusted or self.keep_support:
            return None
        running = [seq for own in last.seqs for seq in own if seq.running]
        if any([seq.stops_at_text for seq in running]):
            return None
        if last.n_running <= last.exit_at or all(seq.remaining <= most for seq in running):
            return None  # it ends them, or stops for a smaller batch
        return self.runner.decode_next(params, last) if self.scheduler.extend(2 * most) else None

    def _prefill(self, params: Tree, work: list[PrefillWork]) -> None:
        """Runs the copies and the prefill of each replica."""
        self._copy(work)
        ready = self._ready("prefill", self.shapes.prefill_buckets)
        for rows, bucket in prefill_calls(self._prefill_rows(work), ready):
            self.runner.prefill(params, rows, bucket)
        self._copy_prefilled(work)

    def _mixed(self, params: Tree, plans: list[DispatchPlan]) -> DecodeRound:
        """`_prefill` and one decode step of the previously running sequences, in one dispatch."""
        work, seqs = [p.prefill for p in plans], [p.previously_running for p in plans]
        variant = self._variant(seqs)
        if not self._ready("mixed", self.shapes.prefill_buckets[-1:], variant):
            self._prefill(params, work)
            return self._decode(params, seqs, n_steps=1)
        self._copy(work)
        rows = self._prefill_rows(work)
        dispatched = self.runner.mixed(params, rows, seqs, variant)
        self._copy_prefilled(work)
        return dispatched

    def _prefill_rows(self, work: list[PrefillWork]) -> list[list[PrefillChunk]]:
        """The prefill rows of each replica."""
        rows = [split_rows(own.chunks, self.shapes.prefill_row_len) for own in work]
        self._stats.n_prefill_tokens += sum(len(row.tokens) for own in rows for row in own)
        return rows

    def _copy(self, work: list[PrefillWork]) -> None:
        """The copies before prefill."""
        in_calls(self.runner.copy_pages, [own.copies for own in work])
        in_calls(self.runner.copy_states, [own.state_copies for own in work])

    def _copy_prefilled(self, work: list[PrefillWork]) -> None:
        """The copies of pages and states that prefill wrote."""
        in_calls(self.runner.copy_pages, [own.post_prefill_copies for own in work])
        in_calls(self.runner.copy_states, [own.post_prefill_state_copies for own in work])

    def _decode(self, params: Tree, seqs: list[list[Sequence]], n_steps: int) -> DecodeRound:
        if any(seq.allowed is not None for own in seqs for seq in own):
            # A grammar allows one token per dispatch; the others decode one step meanwhile.
            n_steps = min(n_steps, 1 + self.rollout.spec_tokens)
        n, variant = max(map(len, seqs)), self._variant(seqs)
        ready = self._ready("decode", self.shapes.decode_buckets, variant)
        bucket = min(b for b in ready if b >= n)
        exit_at = exit_size(n, self.shapes.decode_buckets, self.scheduler.n_waiting)
        return self.runner.decode(params, seqs, bucket, variant, n_steps=n_steps, exit_at=exit_at)

    # Results

    def _read(self, dispatched: DecodeRound) -> list[Generated]:
        """Waits for the tokens of a round. Gives them to the scheduler and returns them by slot.

        Those of sequences that have ended or were cancelled after it was dispatched are dropped.
        """
        try:
            return self._advance(dispatched.seqs, self.runner.read(dispatched))
        except BaseException:
            self.release()  # the device may be ahead of the scheduler
            raise

    def _advance(self, seqs: list[list[Sequence]], output: DecodeOutput) -> list[Generated]:
        """The tokens of each sequence. Thousands are made per dispatch: arrays are views."""
        self._count(seqs, output)
        bucket, generated, scheduler = len(output.tokens) // len(seqs), [], self.scheduler
        n_new, stopped, views = output.n_new.tolist(), output.stopped.tolist(), output.views()
        version = scheduler.version
        for r, own in enumerate(seqs):
            for row, seq in enumerate(own, r * bucket):
                n = n_new[row]
                if not (n and seq.running):
                    continue
                new, logp, behavior_logp = views[row]
                finish = "stop" if stopped[row] else "length" if n == seq.remaining else ""
                follows = seq.allowed is not None and not finish
                error = seq.follow_grammar(new.tolist()) if follows else ""
                finish = "error" if error else finish
                slot = scheduler.advance(r, seq, new, finish)
                if finish and self.images is not None:
                    self.images.remove(slot)
                support = output.kept_tokens(row, n) if self.keep_support else None
                experts = output.row_experts(row, n, self.routing) if self.routing else None
                top = output.top_tokens(row, n) if seq.request.top_logprobs else None
                # By position, which takes half of the time of names.
                sampled = slot, new, logp, behavior_logp, finish
                generated.append(Generated(*sampled, support, experts, top, error, version))
        return generated

    def _count(self, seqs: list[list[Sequence]], output: DecodeOutput) -> None:
        """Adds a dispatch to the counters, with queues and pool as they were during its steps."""
        stats, n_steps = self._stats, output.n_steps
        used = self.scheduler.cache_utilization
        stats.n_steps += n_steps
        stats.n_batch_slots += len(output.tokens) * n_steps
        stats.running += sum([seq.running for own in seqs for seq in own]) * n_steps
        stats.waiting += self.scheduler.n_waiting * n_steps
        stats.cache_used += used * n_steps
        stats.cache_used_max = max(stats.cache_used_max, used)
        stats.n_tokens += output.n_tokens
        stats.n_draft_tokens += output.n_draft_tokens
        stats.n_accepted_tokens += output.n_accepted_tokens
