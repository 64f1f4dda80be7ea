"""The paged engine with continuous batching: scheduling rounds over a model runner."""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator

import jax
import numpy as np
from jax.typing import DTypeLike

from jaxrl.config.keys import RolloutConfig
from jaxrl.data.support import from_bits, unrestricted
from jaxrl.engine.api import EngineStats, Generated, GrammarError, Prefix, Request
from jaxrl.engine.device.adjustments import MAX_BIAS
from jaxrl.engine.device.batches import (
    MAX_STOP_IDS,
    dispatch_shapes,
    exit_size,
    split_rows,
    stop_ids,
)
from jaxrl.engine.device.kv_pool import KVPoolSpec, n_state_slots, window_page_counts
from jaxrl.engine.device.model_runner import COPIES_PER_CALL, DecodeOutput, Dispatch, ModelRunner
from jaxrl.engine.device.sampling import FILTERS
from jaxrl.engine.pages import PagePool
from jaxrl.engine.prefill import PrefillChunk, PrefillWork
from jaxrl.engine.replicas import ReplicaScheduler
from jaxrl.engine.scheduler import DispatchPlan, Scheduler, Sequence
from jaxrl.engine.states import StateSlots
from jaxrl.engine.windows import WindowPages
from jaxrl.models.config import DecoderConfig
from jaxrl.models.kv_cache import page_dtype
from jaxrl.runtime.compilation import CompileThreads, compile_in_threads
from jaxrl.types import TokenSets, Tree
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
        filters: tuple[str, ...] = (),
        adjustable: bool = False,
    ):
        """`max_len` limits prompt plus response, `dtype` is the model's compute dtype.

        `eos_ids` end a response in addition to the stop_token_ids of each request. `keep_support`
        returns the tokens that sampling filters keep, for one bit per token of the vocabulary and
        sampled token on the device. `filters` are the sampling filters that requests may have, by
        their config keys; with any, `warmup` compiles a second variant of the decode programs for
        batches in which a request has one. `adjustable` accepts requests with adjustments and top
        logprobs, for which `warmup` compiles another variant. Raises ValueError for invalid limits.
        """
        _check(rollout, cfg, max_len)
        self.cfg, self.rollout = cfg, rollout
        self.max_len, self.eos_ids = max_len, tuple(eos_ids)
        self.keep_support, self.filters, self.adjustable = keep_support, filters, adjustable
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
        self.shapes = dispatch_shapes(rollout, max_len, cfg)
        self.runner = ModelRunner(
            self.pool,
            self.shapes,
            rollout,
            eos_ids=self.eos_ids,
            implementation=implementation,
            keep_support=keep_support,
            filters=filters,
            n_pages=lambda: self.scheduler.pool.n_pages,
            on_failure=self.release,
        )
        self._scheduler: ReplicaScheduler | None = None
        self._n_pages = 0  # of each replica; 0 until the first allocation
        self._pending: set[Dispatch] = set()  # programs that dispatches must not use yet
        self._stats = EngineStats()

    def set_version(self, version: int) -> None:
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
        """Starts a sequence from a prefix. Returns its slot."""
        self._check_request(request)
        slot, work = self.scheduler.insert(prefix, request)
        self._copy(work)
        return slot

    def submit(self, request: Request) -> int:
        self._check_request(request)
        return self.scheduler.submit(request)

    def generate(self, params: Tree) -> list[Generated]:
        start, device_s = time.perf_counter(), self.runner.device_s
        plans = self.scheduler.plan()
        if any(plan.full for plan in plans):
            seqs = [plan.previously_running for plan in plans]
            output = self._mixed(params, plans)
        else:
            seqs = [plan.decode for plan in plans]
            self._prefill(params, [plan.prefill for plan in plans])
            if not any(seqs):
                return []
            n_steps = min(plan.n_steps for plan in plans if plan.decode)
            output = self._decode(params, seqs, n_steps)
        generated = self._advance(seqs, output)
        device_s = self.runner.device_s - device_s
        self._stats.host_s += time.perf_counter() - start - device_s
        return generated

    def free(self, slot: int) -> None:
        self.scheduler.free(slot)

    @property
    def n_unfinished(self) -> int:
        return self.scheduler.n_unfinished

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
        first = [program for program in declared if self._suffices(program)]
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

    def _suffices(self, program: Dispatch) -> bool:
        shapes = self.shapes
        if program.kind == "decode" and program.filtered != bool(self.filters):
            return False  # the program with filters serves requests without any, too
        buckets = {
            "prefill": shapes.prefill_buckets[0],
            "copy_pages": COPIES_PER_CALL,
            "copy_states": COPIES_PER_CALL,
            "decode": shapes.decode_buckets[-1],
        }
        return program.bucket == buckets.get(program.kind)

    def _ready(self, kind: str, buckets: tuple[int, ...], **variant: bool) -> list[int]:
        """The buckets of a kind whose programs are not pending."""
        return [b for b in buckets if Dispatch(kind, b, **variant) not in self._pending]

    def _variant(self, seqs: list[list[Sequence]]) -> dict[str, bool]:
        """The variant of the sampling programs that the sequences need."""
        requests = [seq.request for own in seqs for seq in own]
        adjusted = any(map(_is_adjusted, requests))
        filtered = adjusted or any(request.sampling.filters for request in requests)
        # The largest program without filters is the last of its variant to be compiled.
        filtered |= not self._ready("decode", self.shapes.decode_buckets[-1:])
        return {"adjusted": adjusted, "filtered": filtered and bool(self.filters)}

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
        self._scheduler = None

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
        )

    # Dispatches

    def _prefill(self, params: Tree, work: list[PrefillWork]) -> None:
        """Runs the copies and the prefill of each replica."""
        self._copy(work)
        rows = self._prefill_rows(work)
        while longest := max(map(len, rows)):
            ready = self._ready("prefill", self.shapes.prefill_buckets)
            bucket = max((b for b in ready if b <= longest), default=ready[0])
            self.runner.prefill(params, [own[:bucket] for own in rows], bucket)
            rows = [own[bucket:] for own in rows]
        self._copy_prefilled(work)

    def _mixed(self, params: Tree, plans: list[DispatchPlan]) -> DecodeOutput:
        """`_prefill` and one decode step of the previously running sequences, in one dispatch."""
        work, seqs = [p.prefill for p in plans], [p.previously_running for p in plans]
        variant = self._variant(seqs)
        if not self._ready("mixed", self.shapes.prefill_buckets[-1:], **variant):
            self._prefill(params, work)
            return self._decode(params, seqs, n_steps=1)
        self._copy(work)
        rows = self._prefill_rows(work)
        output = self.runner.mixed(params, rows, seqs, **variant)
        self._copy_prefilled(work)
        return output

    def _prefill_rows(self, work: list[PrefillWork]) -> list[list[PrefillChunk]]:
        """The prefill rows of each replica."""
        rows = [split_rows(own.chunks, self.shapes.prefill_row_len) for own in work]
        self._stats.n_prefill_tokens += sum(len(row.tokens) for own in rows for row in own)
        return rows

    def _copy(self, work: list[PrefillWork]) -> None:
        """The copies before prefill."""
        _in_calls(self.runner.copy_pages, [own.copies for own in work])
        _in_calls(self.runner.copy_states, [own.state_copies for own in work])

    def _copy_prefilled(self, work: list[PrefillWork]) -> None:
        """The copies of pages and states that prefill wrote."""
        _in_calls(self.runner.copy_pages, [own.post_prefill_copies for own in work])
        _in_calls(self.runner.copy_states, [own.post_prefill_state_copies for own in work])

    def _decode(self, params: Tree, seqs: list[list[Sequence]], n_steps: int) -> DecodeOutput:
        if any(seq.allowed is not None for own in seqs for seq in own):
            # A grammar allows one token per dispatch; the others decode one step meanwhile.
            n_steps = min(n_steps, 1 + self.rollout.spec_tokens)
        n, variant = max(map(len, seqs)), self._variant(seqs)
        ready = self._ready("decode", self.shapes.decode_buckets, **variant)
        bucket = min(b for b in ready if b >= n)
        exit_at = exit_size(n, self.shapes.decode_buckets, self.scheduler.n_waiting)
        return self.runner.decode(params, seqs, bucket, n_steps=n_steps, exit_at=exit_at, **variant)

    # Results

    def _advance(self, seqs: list[list[Sequence]], output: DecodeOutput) -> list[Generated]:
        """Gives the sampled tokens to the scheduler. Returns them by slot."""
        self._count(seqs, output)
        bucket = len(output.tokens) // len(seqs)
        return [
            self._advance_one(r, seq, output, row=r * bucket + b)
            for r, own in enumerate(seqs)
            for b, seq in enumerate(own)
        ]

    def _advance_one(
        self, replica: int, seq: Sequence, output: DecodeOutput, *, row: int
    ) -> Generated:
        n_new, request = int((output.tokens[row] >= 0).sum()), seq.request
        new, error = output.tokens[row, :n_new].copy(), ""
        finish = "length" if n_new == seq.remaining else ""
        if not request.ignore_stop and new[-1] in stop_ids(request, self.eos_ids):
            finish = "stop"
        if not finish:
            try:
                seq.follow_grammar(new.tolist())
            except GrammarError as failed:
                finish, error = "error", str(failed)
        return Generated(
            slot=self.scheduler.advance(replica, seq, new.tolist(), finish),
            tokens=new,
            logp=output.logp[row, :n_new].copy(),
            behavior_logp=output.behavior_logp[row, :n_new].copy(),
            finish=finish,
            support=self._support(output, row, n_new),
            top=output.top_tokens(row, n_new) if request.top_logprobs else None,
            error=error,
            version=self.scheduler.version,
        )

    def _support(self, output: DecodeOutput, row: int, n_new: int) -> TokenSets | None:
        """The tokens that the filters kept at the new tokens of a row."""
        if not self.keep_support:
            return None
        if output.support is None:
            return unrestricted(n_new)
        return from_bits(output.support[:n_new, row])

    def _count(self, seqs: list[list[Sequence]], output: DecodeOutput) -> None:
        """Adds a dispatch to the counters, with queues and pool as they were during its steps."""
        stats, n_steps = self._stats, output.n_steps
        used = self.scheduler.cache_utilization
        stats.n_steps += n_steps
        stats.n_batch_slots += len(output.tokens) * n_steps
        stats.running += sum(map(len, seqs)) * n_steps
        stats.waiting += self.scheduler.n_waiting * n_steps
        stats.cache_used += used * n_steps
        stats.cache_used_max = max(stats.cache_used_max, used)
        stats.n_tokens += output.n_tokens
        stats.n_draft_tokens += output.n_draft_tokens
        stats.n_accepted_tokens += output.n_accepted_tokens

    def _check_request(self, request: Request) -> None:
        n_adapters = self.cfg.lora.n_stacked if self.cfg.lora else 0
        if not 0 <= request.adapter <= n_adapters:
            raise ValueError(
                f"adapter {request.adapter} of a request is not there; the engine has {n_adapters}"
            )
        if (n := len(stop_ids(request, self.eos_ids))) > MAX_STOP_IDS:
            raise ValueError(
                f"{n} stop token ids (end-of-sequence ids included), at most {MAX_STOP_IDS} are "
                "supported; shorten config.rollout.sampling.stop_token_ids"
            )
        if _is_adjusted(request) and not self.adjustable:
            raise ValueError(
                "this engine was built without logit adjustments and top logprobs; set "
                "adjustable=True"
            )
        if missing := [name for name in request.sampling.filters if name not in self.filters]:
            raise ValueError(
                f"this engine was built without the sampling filter {' and '.join(missing)} of a "
                f"request; set filters={FILTERS}"
            )
        if request.adjustments and (n := len(request.adjustments.bias)) > MAX_BIAS:
            raise ValueError(f"{n} tokens have a bias, at most {MAX_BIAS} are supported")


def _in_calls(copy: Callable, copies: list[list[tuple[int, ...]]]) -> None:
    """Makes the copies of each replica, as many in one call as it takes."""
    for i in range(0, max(map(len, copies)), COPIES_PER_CALL):
        copy([own[i : i + COPIES_PER_CALL] for own in copies])


def _is_adjusted(request: Request) -> bool:
    """Whether it needs the programs that change logits and return the most likely tokens."""
    return request.adjustments is not None or request.top_logprobs


def _check(rollout: RolloutConfig, cfg: DecoderConfig, max_len: int) -> None:
    if max_len > cfg.context_len:
        raise ValueError(
            f"prompt and response may take {max_len} tokens, the model supports {cfg.context_len}; "
            "lower config.data.max_prompt_len or config.data.max_response_len"
        )
    for name in ("max_num_seqs", "max_num_batched_tokens", "page_len", "steps_per_dispatch"):
        if (value := getattr(rollout, name)) < 1:
            raise ValueError(f"config.rollout.{name} is {value}; set it to 1 or more")
