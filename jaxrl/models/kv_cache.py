"""Paged KV cache: one page pool per layer, in device memory."""

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike

from jaxrl.kernels.quantized import MAX_VALUE, Quantized
from jaxrl.models.config import DecoderConfig
from jaxrl.types import Tree
from sharding import Rules


@struct.dataclass
class KVCache:
    """Head-major pages: [P, K, page_len, H] per layer in a list, or stacked with a leading L.

    Quantized caches hold a `Quantized` of these, with a scale per head and token.
    """

    k: Tree
    v: Tree

    def layer(self, i: int) -> "KVCache":
        """The cache of layer `i` alone, as that of a model of one layer; for pools in a list."""
        return jax.tree.map(lambda pools: [pools[i]], self, is_leaf=_is_list)

    def with_layer(self, i: int, one: "KVCache") -> "KVCache":
        """The cache with layer `i` replaced by what `layer` returned, after its update."""

        def replace_pool(pools: list[jax.Array], pool: list[jax.Array]) -> list[jax.Array]:
            return [*pools[:i], *pool, *pools[i + 1 :]]

        return jax.tree.map(replace_pool, self, one, is_leaf=_is_list)

    def layer_pages(
        self, layer: jax.Array | None, rules: Rules
    ) -> tuple[Tree, Tree, int | jax.Array]:
        """A layer's key and value pages, and the index of the layer's first page among them.

        Stacked pools return the pages of all layers, because slicing out one layer would copy it. A
        list contains one layer, and `layer` is None.
        """

        def pages(pools: jax.Array | list[jax.Array]) -> jax.Array:
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

        def replace_pages(
            pools: jax.Array | list[jax.Array], pages: jax.Array
        ) -> jax.Array | list[jax.Array]:
            if isinstance(pools, list):
                return [pages]
            spec = rules.spec(None, None, "kv_heads", *(None,) * (pools.ndim - 3))
            return jnp.reshape(pages, pools.shape, out_sharding=spec)

        return jax.tree.map(replace_pages, self, KVCache(k=k, v=v), is_leaf=_is_list)


def _is_list(value: object) -> bool:
    return isinstance(value, list)


def init_cache(
    cfg: DecoderConfig, n_pages: int, page_len: int, dtype: DTypeLike, rules: Rules
) -> KVCache:
    """A zeroed pool of `n_pages` pages per replica, with kv heads sharded by the rules."""
    axes = ("batch", "kv_heads", None, None)
    n_rows, lead = rules.n_shards("batch") * n_pages, (cfg.L,) if cfg.stacked else ()
    check_generates(cfg)
    shapes = [(n_rows, mixer.K, page_len, mixer.H) for mixer in cfg.attention_layers]
    if cfg.stacked and len(set(shapes)) > 1:
        raise ValueError(
            f"layers of this {cfg.family} model differ in their kv heads or head size, so their "
            "KV pages cannot be stacked; set config.model.layers='list'"
        )

    def pools(n_axes: int, dtype: DTypeLike) -> Tree:
        spec = rules.spec(*(None,) * len(lead), *axes[:n_axes])

        def pool(shape: tuple[int, ...]) -> jax.Array:
            return jnp.zeros(lead + shape[:n_axes], dtype, out_sharding=spec)

        return pool(shapes[0]) if cfg.stacked else [pool(shape) for shape in shapes]

    def layer_pools() -> Tree:
        if is_quantized_dtype(dtype):
            return Quantized(pools(4, dtype), pools(3, SCALE_DTYPE))
        return pools(4, dtype)

    return KVCache(k=layer_pools(), v=layer_pools())


def check_generates(cfg: DecoderConfig) -> None:
    """Raises ValueError for layers without keys and values, whose states the cache cannot hold."""
    if len(cfg.attention_layers) < cfg.L:
        raise ValueError(
            f"generation with {cfg.family} models is not supported yet: the engine has no cache of "
            "the states of gated DeltaNet; train this model offline (jaxrl.sft, jaxrl.dpo, "
            "jaxrl.reward_model), or choose a model with attention in every layer"
        )


SCALE_DTYPE = jnp.float32  # of quantized pages


def is_quantized_dtype(dtype: DTypeLike) -> bool:
    return jnp.dtype(dtype).name in MAX_VALUE


def page_dtype(name: str, dtype: DTypeLike) -> jnp.dtype:
    """The dtype that `rollout.kv_dtype` selects for a model of `dtype`."""
    return jnp.dtype({"auto": dtype, "fp8": jnp.float8_e4m3fn}.get(name, name))


def page_bytes(cfg: DecoderConfig, page_len: int, dtype: DTypeLike) -> int:
    """Bytes of one page over all layers and devices, keys and values together."""
    scale = jnp.dtype(SCALE_DTYPE).itemsize if is_quantized_dtype(dtype) else 0
    item = jnp.dtype(dtype).itemsize
    heads = ((mixer.K, mixer.H) for mixer in cfg.attention_layers)
    return sum(2 * K * page_len * (H * item + scale) for K, H in heads)
