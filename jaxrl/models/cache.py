"""The paged key-value cache: one pool of pages a layer, in device memory."""

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike

from jaxrl.kernels.quantized import LARGEST, Quantized
from jaxrl.models.config import DecoderConfig
from jaxrl.types import Tree
from sharding import Rules


@struct.dataclass
class KVCache:
    """Head-major pages: a list of [P, K, page_len, H] per layer, or one [L, P, K, page_len, H]. In 8 bits a
    `Quantized` of such, with a scale for each head of a token."""

    k: Tree
    v: Tree


def init_cache(
    cfg: DecoderConfig, n_pages: int, page_len: int, dtype: DTypeLike, rules: Rules
) -> KVCache:
    """A pool of `n_pages` pages of `page_len` tokens for each replica of the rules, zeroed, kv heads
    sharded as the rules say."""
    shape = (rules.n_shards("batch") * n_pages, cfg.K, page_len, cfg.H)
    axes = ("batch", "kv_heads", None, None)

    def pools(n_axes: int, dtype: DTypeLike) -> Tree:
        lead = (cfg.L,) if cfg.stacked else ()
        spec = rules.spec(*(None,) * len(lead), *axes[:n_axes])

        def pool() -> jax.Array:
            return jnp.zeros(lead + shape[:n_axes], dtype, out_sharding=spec)

        return pool() if cfg.stacked else [pool() for _ in range(cfg.L)]

    def numbers() -> Tree:
        if in_eight_bits(dtype):
            return Quantized(pools(4, dtype), pools(3, SCALE))
        return pools(4, dtype)

    return KVCache(k=numbers(), v=numbers())


SCALE = jnp.float32  # of the scales of pages


def in_eight_bits(dtype: DTypeLike) -> bool:
    return jnp.dtype(dtype).name in LARGEST


def page_dtype(name: str, dtype: DTypeLike) -> jnp.dtype:
    """What `rollout.kv_dtype` means for a model of `dtype`."""
    return jnp.dtype({"auto": dtype, "fp8": jnp.float8_e4m3fn}.get(name, name))


def page_bytes(cfg: DecoderConfig, page_len: int, dtype: DTypeLike) -> int:
    """Bytes of one page over all layers, keys and values together, over all devices."""
    scale = jnp.dtype(SCALE).itemsize if in_eight_bits(dtype) else 0
    return 2 * cfg.L * cfg.K * page_len * (cfg.H * jnp.dtype(dtype).itemsize + scale)
