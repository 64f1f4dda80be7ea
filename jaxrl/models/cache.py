"""The paged key-value cache: one pool of pages a layer, in device memory."""

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike

from jaxrl.models.config import DecoderConfig
from jaxrl.types import Tree
from sharding import Rules


@struct.dataclass
class KVCache:
    """Head-major pages: a list of [P, K, page_len, H] per layer, or one [L, P, K, page_len, H]."""

    k: Tree
    v: Tree


def init_cache(
    cfg: DecoderConfig, n_pages: int, page_len: int, dtype: DTypeLike, rules: Rules
) -> KVCache:
    """A pool of `n_pages` pages of `page_len` tokens for each replica of the rules, zeroed, kv heads
    sharded as the rules say."""
    shape = (rules.n_shards("batch") * n_pages, cfg.K, page_len, cfg.H)
    axes = ("batch", "kv_heads", None, None)

    def pool(lead: tuple[int, ...]) -> jax.Array:
        spec = rules.spec(*(None,) * len(lead), *axes)
        return jnp.zeros(lead + shape, dtype, out_sharding=spec)

    def pools() -> Tree:
        return pool((cfg.L,)) if cfg.stacked else [pool(()) for _ in range(cfg.L)]

    return KVCache(k=pools(), v=pools())


def page_bytes(cfg: DecoderConfig, page_len: int, dtype: DTypeLike) -> int:
    """Bytes of one page over all layers, keys and values together, over all devices."""
    return 2 * cfg.L * cfg.K * page_len * cfg.H * jnp.dtype(dtype).itemsize
