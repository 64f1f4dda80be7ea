"""The compiled programs: prefill, prefill mixed with a decode step, page copies, decode.

The KV cache is donated to each program, which updates it in place and returns it, as a `FlatTree`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Int, Shaped

from jaxrl.engine.device.decode_loop import (
    DecodeBatch,
    DecodeState,
    DispatchOutput,
    decode_steps,
    sample_tokens,
    state_spec,
)
from jaxrl.engine.device.sampling import row_keys
from jaxrl.engine.device.speculative import SpeculationConfig, speculative_steps
from jaxrl.kernels.bits import ROUND_AS_WRITTEN
from jaxrl.models.adapter_stack import choose_adapters
from jaxrl.models.decoder import Decoder
from jaxrl.models.image_features import ImageFeatures
from jaxrl.models.kv_cache import JoinedPools, KVCache, of_window
from jaxrl.models.paged import PageTables, PrefillSlots, forward_mixed, forward_paged
from jaxrl.models.router_replay import recording
from jaxrl.runtime.flat_program import FlatProgram, FlatTree, flatten
from jaxrl.types import Tree
from sharding import Rules, target_platform

# On GPU, XLA joins products that share an input if their arrays are small enough (64 MB). As the
# weights are arguments, every decode step would copy those of q, k, v and of gate and up into one
# array, which moves them three times instead of once. Other platforms ignore the option.
COMPILER_OPTIONS = {"xla_gpu_dot_merger_threshold_mb": 0, **ROUND_AS_WRITTEN}
# XLA's default kinds of operations in CUDA graphs, and loops. There is no kind for the kernels of
# collectives before JAX 0.12.
IN_GRAPHS = (
    "FUSION", "CUBLAS", "CUBLASLT", "CUDNN", "CUSTOM_CALL", "CONDITIONAL", "DYNAMIC_SLICE_FUSION",
    "WHILE", *(["COLLECTIVES_KERNEL"] if jax.__version_info__ >= (0, 12) else []),
)  # fmt: skip
GRAPH_OPTIONS = {"xla_gpu_enable_command_buffer": ",".join(IN_GRAPHS)}


@functools.cache
def engine_program(kind: str, *, cuda_graph: bool = False, **static: Any) -> FlatProgram:
    """The program of a function of this file, with values for its keyword arguments.

    Engines of the same shapes share it. With `cuda_graph` its loops are in one CUDA graph.
    """
    functions = (prefill, mixed, copy_pages, copy_states, decode)
    function = next(f for f in functions if f.__name__ == kind)
    return FlatProgram(
        functools.partial(function, **static),
        compiler_options=COMPILER_OPTIONS | (GRAPH_OPTIONS if cuda_graph else {}),
        donate_argnums=0 if function in (copy_pages, copy_states) else 1,
    )


@struct.dataclass
class PrefillImages:
    """The images of a `PrefillBatch`."""

    features: ImageFeatures  # of the rows
    axis_positions: Any = None  # int32 [R, T, 3]; None: a model with one position per token
    ahead: Any = None  # int32 [R, T], last positions that tokens see; None: their own


@struct.dataclass
class PrefillBatch:
    """Rows of tokens whose KV is computed; they may be consecutive pieces of one sequence."""

    tokens: Any  # int32 [R, T]
    positions: Any  # int32 [R, T], -1 at padding
    page_tables: PageTables  # of R rows
    adapters: Any  # int32 [R]; None for an engine without any
    slots: PrefillSlots | None = None  # None for models without a state
    images: PrefillImages | None = None  # None: the program has none

    @property
    def features(self) -> ImageFeatures | None:
        return None if self.images is None else self.images.features

    @property
    def rotary(self) -> Int[Array, "R T 3"] | None:
        """The positions by axis, if they are not those of text."""
        return None if self.images is None else self.images.axis_positions

    @property
    def ahead(self) -> Int[Array, "R T"] | None:
        """The last positions that tokens see, if those of an image see each other."""
        return None if self.images is None else self.images.ahead

    def adapter_of_tokens(self) -> Int[Array, "R T"] | None:
        if self.adapters is None:
            return None
        return jnp.broadcast_to(self.adapters[:, None], self.tokens.shape)


def per_replica(
    program: Callable,
    rules: Rules,
    *,
    cache_axis: int,
    n_inputs: int,
    output_axes: tuple[int, ...] = (),
) -> Callable:
    """`program(params, cache, *inputs)` of one replica, run by every replica on its shard.

    The pages of the cache (axis `cache_axis`) and the leading axis of the `n_inputs` input trees
    are sharded over the replicas, and so are the `output_axes` of what the program returns after
    the cache; parameters are replicated. Replicas communicate only to agree on the end of a decode
    loop.
    """
    axes = rules.mesh_axes("batch")
    if not axes:
        return program
    pages, by_row = jax.P(*(None,) * cache_axis, axes), jax.P(axes)
    outputs = tuple(jax.P(*(None,) * axis, axes) for axis in output_axes)
    sharded = jax.shard_map(
        program,
        in_specs=(jax.P(), pages, *(by_row,) * n_inputs),
        out_specs=(pages, *outputs) if outputs else pages,
        axis_names=set(axes),
        check_vma=False,
    )

    def run(params: Tree, cache: KVCache, *inputs: Tree):
        return sharded(params, cache, *jax.tree.map(lambda a: jax.reshard(a, by_row), inputs))

    return run


def _cache_axis(params: Decoder, cache: KVCache) -> int:
    return int(params.cfg.stacked and cache.joined is None)


@jax.named_scope("rollout")
def prefill(
    params: Decoder,
    cache: KVCache,
    batch: PrefillBatch,
    *,
    rules: Rules,
    implementation: str | None,
) -> FlatTree:
    """Writes the KV of the batch. Every layer writes that of all rows before any row attends."""

    def prefill_one(params: Decoder, cache: KVCache, batch: PrefillBatch) -> KVCache:
        params = choose_adapters(params, batch.adapter_of_tokens())
        _, cache = forward_paged(
            params,
            batch.tokens,
            batch.positions,
            cache,
            batch.page_tables,
            batch.slots,
            features=batch.features,
            rotary=batch.rotary,
            ahead=batch.ahead,
            rules=rules.in_replica(),
            implementation=implementation,
        )
        return cache

    run = per_replica(prefill_one, rules, cache_axis=_cache_axis(params, cache), n_inputs=1)
    return flatten(run(params, cache, batch))


@jax.named_scope("rollout")
def mixed(
    params: Decoder,
    cache: KVCache,
    prefilled: PrefillBatch,
    batch: DecodeBatch,
    *,
    rules: Rules,
    implementation: str | None,
    keep_support: bool = False,
    keep_experts: bool = False,
    never: int | None = None,
) -> tuple[FlatTree, DispatchOutput]:
    """`prefill` and one `decode` step of already prefilled sequences, in one forward pass."""

    def mixed_one(params: Decoder, cache: KVCache, prefilled: PrefillBatch, batch: DecodeBatch):
        local = rules.in_replica()
        adapters = prefilled.adapter_of_tokens()
        if adapters is not None:
            adapters = jnp.concatenate([adapters.reshape(-1), batch.adapter])[None]
        params = choose_adapters(params, adapters)
        hidden, cache, load = forward_mixed(
            recording(params) if keep_experts else params,
            prefilled.tokens,
            prefilled.positions,
            prefilled.page_tables,
            batch.token,
            batch.position,
            batch.page_tables,
            cache,
            prefilled.slots,
            batch.slots,
            features=prefilled.features,
            prefill_rotary=prefilled.rotary,
            rotary=batch.rotary(batch.position),
            rules=local,
            implementation=implementation,
        )
        keys = row_keys(batch.seed, batch.prompt_id, batch.sample)
        out, _ = sample_tokens(
            choose_adapters(params, batch.adapter_of_tokens),
            hidden,
            keys,
            batch.position,
            batch,
            batch.counts(params.cfg.V),
            local,
            keep_support=keep_support,
            never=never,
        )
        return cache, out.with_experts(load, params.cfg) if keep_experts else out

    run = per_replica(
        mixed_one, rules, cache_axis=_cache_axis(params, cache), n_inputs=2, output_axes=(1,)
    )
    cache, out = run(params, cache, prefilled, batch)
    return flatten(cache), jax.reshard(out, jax.P())


@jax.named_scope("rollout")
def copy_pages(
    cache: KVCache,
    sources: dict[int, Int[Array, "n"]],
    targets: dict[int, Int[Array, "n"]],
    *,
    rules: Rules,
    stacked: bool,
    windows: tuple[int, ...],
) -> FlatTree:
    """targets[i] <- sources[i] in every layer; a target past the end of the pool is padding.

    The pages are by window, as `PageTables`; `windows` has that of each layer.
    """
    lead = (slice(None),) if stacked and cache.joined is None else ()

    def copy_one(_, cache: KVCache, sources, targets) -> KVCache:
        def copied(pages: KVCache, source: jax.Array, target: jax.Array) -> KVCache:
            def copy(pool: jax.Array) -> jax.Array:
                if lead and target_platform() == "tpu":
                    return _copy_slices(pool, source, target)
                axes = (*(None,) * len(lead), None, "kv_heads")
                spec = rules.in_replica().spec(*axes, *(None,) * (pool.ndim - len(axes)))
                found = pool.at[(*lead, source)].get(out_sharding=spec)
                return pool.at[(*lead, target)].set(found, mode="drop", out_sharding=spec)

            return jax.tree.map(copy, pages)

        pages = dataclasses.replace(cache, states=None)
        if cache.joined is not None:
            for i in range(pages.n_pools):
                pool = pages.pool(i)
                assert isinstance(pool.joined, JoinedPools)
                source, target = (_in_joined(ids, pool.joined) for ids in (sources, targets))
                pages = pages.with_pool(i, copied(pool, source, target))
        elif stacked:
            window = windows[0]
            pages = copied(pages, of_window(sources, window), of_window(targets, window))
        else:
            for i, window in enumerate(windows):
                source, target = of_window(sources, window), of_window(targets, window)
                pages = pages.with_layer(i, copied(pages.layer(i), source, target))
        return dataclasses.replace(pages, states=cache.states)

    run = per_replica(copy_one, rules, cache_axis=len(lead), n_inputs=2)
    return flatten(run(None, cache, sources, targets))


def _copy_slices(
    pool: Shaped[Array, "L n_pages ..."], sources: Int[Array, "n"], targets: Int[Array, "n"]
) -> Shaped[Array, "L n_pages ..."]:
    """Page sources[i] of all layers is copied to page targets[i], one i after the other.

    For a gather of pages of stacked layers the compiler of TPU copies the whole pool.
    """
    is_page = targets < pool.shape[1]
    sources, targets = (jnp.where(is_page, ids, 0) for ids in (sources, targets))

    def one(i: jax.Array, pool: jax.Array) -> jax.Array:
        page = jax.lax.dynamic_index_in_dim(pool, sources[i], axis=1)
        return jax.lax.dynamic_update_slice_in_dim(pool, page, targets[i], axis=1)

    return jax.lax.fori_loop(0, len(sources), one, pool)


def _in_joined(ids: dict[int, Int[Array, "n"]], joined: JoinedPools) -> Int[Array, "m"]:
    """The pages of all layers in joined pools; past their end if past that of a layer."""
    *starts, end = joined.starts
    rows = []
    for window, size, start in zip(joined.windows, joined.sizes, starts, strict=True):
        page = of_window(ids, window)
        rows.append(jnp.where(page < size, start + page, end))
    return jnp.concatenate(rows)


@jax.named_scope("rollout")
def copy_states(
    cache: KVCache,
    sources: Int[Array, "n"],
    targets: Int[Array, "n"],
    *,
    rules: Rules,
    stacked: bool,
) -> FlatTree:
    """Slot targets[i] <- slot sources[i] in every layer with a state, one i after the other."""
    axis = int(stacked)

    def copy_one(_, cache: KVCache, sources, targets) -> KVCache:
        def one(i: jax.Array, pool: jax.Array) -> jax.Array:
            state = jax.lax.dynamic_index_in_dim(pool, sources[i], axis)
            return jax.lax.dynamic_update_slice_in_dim(pool, state, targets[i], axis)

        def copy(pool: jax.Array) -> jax.Array:
            return jax.lax.fori_loop(0, len(sources), one, pool)

        return dataclasses.replace(cache, states=jax.tree.map(copy, cache.states))

    run = per_replica(copy_one, rules, cache_axis=axis, n_inputs=2)
    return flatten(run(None, cache, sources, targets))


@jax.named_scope("rollout")
def decode(
    params: Decoder,
    cache: KVCache,
    batch: DecodeBatch,
    n_steps: Int[Array, ""],
    exit_at: Int[Array, ""],
    *,
    rules: Rules,
    implementation: str | None,
    max_steps: int,
    speculation: SpeculationConfig | None = None,
    keep_support: bool = False,
    keep_experts: bool = False,
    never: int | None = None,
) -> tuple[FlatTree, DispatchOutput, DecodeState]:
    """Up to `n_steps` decode steps, until every replica runs `exit_at` sequences or fewer.

    Returns the cache, and the output and state of `decode_steps`, or of `speculative_steps` if
    `speculation` is set; then a step samples up to 1 + speculation.n_tokens tokens.
    """
    steps: Callable = decode_steps
    if speculation is not None:
        steps = functools.partial(speculative_steps, config=speculation)

    def decode_one(params: Decoder, cache: KVCache, batch: DecodeBatch):
        return steps(
            params,
            cache,
            batch,
            n_steps,
            exit_at,
            rules=rules,
            implementation=implementation,
            max_steps=max_steps,
            keep_support=keep_support,
            keep_experts=keep_experts,
            never=never,
        )

    run = per_replica(
        decode_one, rules, cache_axis=_cache_axis(params, cache), n_inputs=1, output_axes=(1, 0)
    )
    cache, out, state = run(params, cache, batch)
    state = jax.tree.map(lambda a: jax.reshard(a, state_spec(rules, a.ndim)), state)
    return flatten(cache), jax.reshard(out, jax.P()), state
