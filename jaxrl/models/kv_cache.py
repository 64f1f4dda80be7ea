"""The cache of sequences in device memory: a pool of KV pages or of state slots for each layer."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Collection, Mapping

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike

from jaxrl.kernels.quantized import MAX_VALUE, Quantized
from jaxrl.models.cache_layout import page_owners, page_shape, page_shapes, page_width
from jaxrl.models.config import AttentionConfig, DecoderConfig, MLAConfig
from jaxrl.models.state_mixers import GatedDeltaNetConfig, ShortConvConfig
from jaxrl.types import Tree
from sharding import Rules, target_platform

Pools = list[jax.Array | None]  # of all layers; None for those of another kind


@struct.dataclass
class StateCache:
    """Slots of layers with a state (kernels/gated_delta/pool.py), as the pages of `KVCache`.

    W1 is the length of the convolution less 1; the letters are those of GatedDeltaNetConfig. A
    short convolution has the inputs at the last tokens in `v`, and None in the others.
    """

    qk: Tree  # [S, W1, K, 2 D], queries and keys before the convolution, of the last tokens
    v: Tree  # [S, W1, N, V], their values
    state: Tree  # float32 [S, N, D, V], after the last token

    def _specs(self, rules: Rules) -> "StateCache":
        """The sharding of a layer's slots; None for the parts that there are not."""
        tail = rules.spec("batch", None, "heads", None)
        state = rules.spec("batch", "heads", None, None)
        return StateCache(
            None if self.qk is None else tail, tail, None if self.state is None else state
        )

    def layer_slots(self, layer: jax.Array | None, rules: Rules) -> tuple[Tree, int | jax.Array]:
        """(pools of a layer, index of its first slot among them), as `KVCache.layer_pages`."""

        def slots(pools: jax.Array | list[jax.Array], spec: jax.P) -> jax.Array:
            if isinstance(pools, list):
                return pools[0]
            shape = (-1, *pools.shape[2:])
            return jnp.reshape(pools, shape, out_sharding=spec)

        first = 0 if layer is None else layer * self.v.shape[1]
        return jax.tree.map(slots, self, self._specs(rules), is_leaf=_is_list), first

    def with_slots(self, new: "StateCache", rules: Rules) -> "StateCache":
        """The cache with the pools of `layer_slots` replaced by their updated values."""

        def replace(pools: jax.Array | list[jax.Array], slots: jax.Array, spec: jax.P):
            if isinstance(pools, list):
                return [slots]
            return jnp.reshape(slots, pools.shape, out_sharding=jax.P(None, *spec))

        return jax.tree.map(replace, self, new, self._specs(rules), is_leaf=_is_list)


@struct.dataclass
class DraftInputs:
    """Inputs of layers with a state at W tokens of B sequences, of which some are accepted.

    In a list of all layers, or stacked, as `StateCache`. A short convolution has `v` only.
    """

    qk: Tree  # [B, W, K, 2 D], before the convolution
    v: Tree  # [B, W, N, V], before the convolution
    k: Tree  # [B, W, K, D], of the gated delta rule
    values: Tree  # [B, W, N, V]
    g: Tree  # float32 [B, W, N]
    beta: Tree  # [B, W, N]


@dataclasses.dataclass(frozen=True)
class JoinedPools:
    """The places of layers with different numbers of pages in one array, layer after layer."""

    windows: tuple[int, ...]  # of each layer
    sizes: tuple[int, ...]  # pages of each layer of a replica

    @property
    def starts(self) -> tuple[int, ...]:
        """The first page of each layer, and the number of all pages."""
        return tuple(itertools.accumulate(self.sizes, initial=0))


@struct.dataclass
class KVCache:
    """Head-major pages: [P, K, page_len, H] of every layer with attention, and slots of the others.

    They are in a list of all layers, with None for those of the other kind and for those that use
    the pages of an earlier layer, or stacked with a leading axis of the layers of their kind. If
    stacked layers differ in P, their pages are joined on that axis. If they differ in K or H, k, v
    and `joined` are tuples, with joined pages for each shape (cache_layout.py). Quantized caches
    hold a `Quantized` of the pages, with a scale per head and token.
    """

    k: Tree
    v: Tree
    states: StateCache | None = None
    joined: JoinedPools | tuple[JoinedPools, ...] | None = struct.field(
        pytree_node=False, default=None
    )
    # While draft tokens are verified (draft_states.py); then layers leave the states as they are.
    drafts: DraftInputs | None = None

    @property
    def page_len(self) -> int:
        """Tokens of a page, in models that have layers with attention; else 1."""
        pools = jax.tree.leaves(self.k)
        return pools[0].shape[-2] if pools else 1

    def layer(self, i: int) -> "KVCache":
        """The cache of layer `i` alone, as that of a model of one layer; for pools in a list."""
        return jax.tree.map(lambda pools: [pools[i]], self, is_leaf=_is_list)

    def with_layer(self, i: int, one: "KVCache") -> "KVCache":
        """The cache with layer `i` replaced by what `layer` returned, after its update."""

        def replace_pool(pools: Pools, pool: Pools) -> Pools:
            return [*pools[:i], *pool, *pools[i + 1 :]]

        return jax.tree.map(replace_pool, self, one, is_leaf=_is_list)

    @property
    def n_pools(self) -> int:
        """Shapes of the pages of stacked layers."""
        return len(self.joined) if isinstance(self.joined, tuple) else 1

    def pool(self, number: int) -> "KVCache":
        """The cache with the pages of one shape only, as that of a model without other shapes."""
        if not isinstance(self.joined, tuple):
            return self
        k, v, joined = self.k[number], self.v[number], self.joined[number]
        return dataclasses.replace(self, k=k, v=v, joined=joined)

    def with_pool(self, number: int, one: "KVCache") -> "KVCache":
        """The cache with the pages of one shape replaced by what `pool` returned, updated."""
        if not isinstance(self.joined, tuple):
            return one
        before, after = slice(number), slice(number + 1, None)
        k, v = ((*old[before], new, *old[after]) for old, new in ((self.k, one.k), (self.v, one.v)))
        return dataclasses.replace(one, k=k, v=v, joined=self.joined)

    def layer_pages(
        self, layer: jax.Array | None, rules: Rules
    ) -> tuple[Tree, Tree, int | jax.Array]:
        """A layer's key and value pages, and the index of the layer's first page among them.

        Stacked pools return the pages of all layers, because slicing out one layer would copy it. A
        list contains one layer, and `layer` is None.
        """
        if self.joined is not None:
            assert isinstance(self.joined, JoinedPools), "`pool` chooses the pages of one shape"
            return self.k, self.v, jnp.asarray(self.joined.starts)[layer]

        def pages(pools: jax.Array | Pools) -> jax.Array | None:
            if isinstance(pools, list):
                return pools[0]
            L, P, *rest = pools.shape
            spec = rules.spec(None, "kv_heads", *(None,) * (len(rest) - 1))
            return jnp.reshape(pools, (L * P, *rest), out_sharding=spec)

        k, v = (jax.tree.map(pages, pools, is_leaf=_is_list) for pools in (self.k, self.v))
        pools = jax.tree.leaves(self.k, is_leaf=_is_list)[0]
        return k, v, 0 if layer is None else layer * pools.shape[1]

    def with_pages(self, k: Tree, v: Tree, rules: Rules) -> "KVCache":
        """The cache with the pages of `layer_pages` replaced by their updated values."""
        if self.joined is not None:
            return dataclasses.replace(self, k=k, v=v)

        def replace_pages(pools: jax.Array | Pools, pages: jax.Array | None) -> jax.Array | Pools:
            if isinstance(pools, list):
                return [pages]
            assert pages is not None
            spec = rules.spec(None, None, "kv_heads", *(None,) * (pools.ndim - 3))
            return jnp.reshape(pages, pools.shape, out_sharding=spec)

        old = KVCache(k=self.k, v=self.v)
        new = jax.tree.map(replace_pages, old, KVCache(k=k, v=v), is_leaf=_is_list)
        return dataclasses.replace(new, states=self.states, drafts=self.drafts)


def _is_list(value: object) -> bool:
    return isinstance(value, list)


def init_cache(
    cfg: DecoderConfig,
    n_pages: int,
    page_len: int,
    dtype: DTypeLike,
    rules: Rules,
    *,
    window_pages: Mapping[int, int] | None = None,
    n_slots: int = 0,
    tail_dtype: DTypeLike = jnp.float32,
) -> KVCache:
    """A zeroed pool of `n_pages` pages and `n_slots` slots per replica, with heads sharded.

    Layers with a window in `window_pages` have that number of pages. `dtype` is that of the pages,
    `tail_dtype` that of the convolutions' inputs.
    """
    sizes = {0: n_pages, **(window_pages or {})}
    n_replicas = rules.n_shards("batch")
    mixers = [layer.mixer for layer in cfg.layers]
    shapes = [page_shape(mixer) for mixer in mixers]
    platform = target_platform()
    pages = [
        shape
        and (
            n_replicas * of_window(sizes, mixer.window),
            shape[0],
            page_len,
            page_width(shape[1], platform),
        )
        for mixer, shape in zip(mixers, shapes, strict=True)
    ]
    values = [
        page if isinstance(mixer, AttentionConfig) else None
        for page, mixer in zip(pages, mixers, strict=True)
    ]
    spec = page_rules(cfg, rules).spec("batch", "kv_heads", None, None)

    def pools(pages: list[tuple[int, ...] | None]) -> Tree:
        one = functools.partial(_pools, cfg, join=join)
        if not is_quantized_dtype(dtype) or not any(pages):
            return one(pages, dtype, spec)
        scales = [shape and shape[:3] for shape in pages]
        return Quantized(one(pages, dtype, spec), one(scales, SCALE_DTYPE, jax.P(*spec[:3])))

    def layer_pools(pages: list[tuple[int, ...] | None]) -> Tree:
        if len(joined) < 2:
            return pools(pages)
        return tuple(
            pools([page for page, its in zip(pages, shapes, strict=True) if its == shape])
            for shape in page_shapes(cfg)
        )

    join = cfg.stacked and len({pair for pair in zip(pages, shapes, strict=True) if pair[0]}) > 1
    joined = _joined_pools(cfg, sizes) if join else ()
    states = _state_pools(cfg, rules, n_slots, tail_dtype) if cfg.state_layers else None
    return KVCache(
        k=layer_pools(pages),
        v=layer_pools(values),
        states=states,
        joined=joined if len(joined) > 1 else next(iter(joined), None),
    )


def page_rules(cfg: DecoderConfig, rules: Rules) -> Rules:
    """The rules of KV pages, which shard no head where layers have one for all queries."""
    latent = any(isinstance(mixer, MLAConfig) for mixer in cfg.paged_layers)
    return dataclasses.replace(rules, kv_heads=None) if latent else rules


def _joined_pools(cfg: DecoderConfig, sizes: Mapping[int, int]) -> tuple[JoinedPools, ...]:
    """The joined pools of each shape of pages."""
    found = []
    for shape in page_shapes(cfg):
        windows = tuple(m.window for m in page_owners(cfg) if page_shape(m) == shape)
        found.append(JoinedPools(windows, tuple(of_window(sizes, window) for window in windows)))
    return tuple(found)


def _state_pools(
    cfg: DecoderConfig, rules: Rules, n_slots: int, tail_dtype: DTypeLike
) -> StateCache:
    S, tail = rules.n_shards("batch") * n_slots, rules.spec("batch", None, "heads", None)

    def pools(part: int, dtype: DTypeLike, spec: jax.P) -> Tree:
        mixers = [layer.mixer for layer in cfg.layers]
        kinds = (GatedDeltaNetConfig, ShortConvConfig)
        found = [m.slot_shapes[part] if isinstance(m, kinds) else None for m in mixers]
        shapes = [shape and (S, *shape) for shape in found]
        return _pools(cfg, shapes, dtype, spec) if any(shapes) else None

    state = rules.spec("batch", "heads", None, None)
    return StateCache(
        pools(0, tail_dtype, tail), pools(1, tail_dtype, tail), pools(2, jnp.float32, state)
    )


def _pools(
    cfg: DecoderConfig,
    shapes: list[tuple[int, ...] | None],
    dtype: DTypeLike,
    spec: jax.P,
    *,
    join: bool = False,
) -> Tree:
    """Zeroed pools of the layers with a shape: in a list of all layers, stacked, or joined."""
    if not cfg.stacked:
        return [None if s is None else jnp.zeros(s, dtype, out_sharding=spec) for s in shapes]
    found = [shape for shape in shapes if shape is not None]
    if not found:
        return None
    if join:
        n_rows = sum(shape[0] for shape in found)
        return jnp.zeros((n_rows, *found[0][1:]), dtype, out_sharding=spec)
    return jnp.zeros((len(found), *found[0]), dtype, out_sharding=jax.P(None, *spec))


def of_window[T](groups: Mapping[int, T], window: int | jax.Array) -> T:
    """The value for layers with this window: that of the window, or of 0, all tokens.

    A traced window is of layers that differ in it and keep all tokens.
    """
    return groups.get(window, groups[0]) if isinstance(window, int) else groups[0]


def of_layer(
    groups: Mapping[int, jax.Array],
    window: int | jax.Array,
    layer: jax.Array | None,
    cache: KVCache,
) -> jax.Array:
    """`of_window` of a layer; in joined pools `layer` chooses among arrays of one shape."""
    if cache.joined is None:
        return of_window(groups, window)
    assert isinstance(cache.joined, JoinedPools), "`pool` chooses the pages of one shape"
    keys = list(groups)
    places = [keys.index(w) if w in keys else keys.index(0) for w in cache.joined.windows]
    if len(set(places)) == 1:
        return groups[keys[places[0]]]
    chosen = jnp.asarray(places)[layer]
    return jax.lax.dynamic_index_in_dim(jnp.stack(list(groups.values())), chosen, keepdims=False)


SCALE_DTYPE = jnp.float32  # of quantized pages


def is_quantized_dtype(dtype: DTypeLike) -> bool:
    return jnp.dtype(dtype).name in MAX_VALUE


def page_dtype(name: str, dtype: DTypeLike) -> jnp.dtype:
    """The dtype that `rollout.kv_dtype` selects for a model of `dtype`."""
    return jnp.dtype({"auto": dtype, "fp8": jnp.float8_e4m3fn}.get(name, name))


def page_bytes(
    cfg: DecoderConfig,
    page_len: int,
    dtype: DTypeLike,
    windows: Collection[int] = (),
    *,
    platform: str = "",
) -> dict[int, int]:
    """Bytes of one page over all devices and layers, keys and values together.

    `platform` is that of the devices (default: that of the current mesh).

    Those of the layers with one of `windows` are under that window, those of all others under 0.
    """
    scale = jnp.dtype(SCALE_DTYPE).itemsize if is_quantized_dtype(dtype) else 0
    item = jnp.dtype(dtype).itemsize
    found = dict.fromkeys((0, *windows), 0)
    for mixer in page_owners(cfg):
        window = mixer.window if mixer.window in found else 0
        n_heads, features = page_shape(mixer) or (0, 0)
        width = page_width(features, platform or target_platform())
        n_pools = 1 if isinstance(mixer, MLAConfig) else 2
        found[window] += n_pools * n_heads * page_len * (width * item + scale)
    return found


def slot_bytes(cfg: DecoderConfig, tail_dtype: DTypeLike) -> int:
    """Bytes of one slot over all layers and devices."""
    sizes = (jnp.dtype(tail_dtype).itemsize,) * 2 + (4,)
    return sum(
        size * math.prod(shape)
        for mixer in cfg.state_layers
        for size, shape in zip(sizes, mixer.slot_shapes, strict=True)
        if shape is not None
    )
