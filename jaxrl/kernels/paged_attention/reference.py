"""Reference paged attention: gather the pages, then attend."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl.kernels.attention.online_softmax import MASKED
from jaxrl.kernels.attention_spec import AttentionSpec
from jaxrl.kernels.paged_attention.pages import Pages
from jaxrl.kernels.quantized import dequantize
from jaxrl.kernels.sinks import softmax_with_sinks


def paged_attention_reference(
    q: Float[Array, "B T N H"],
    k_pages: Pages,
    v_pages: Pages | None,
    *,
    spec: AttentionSpec,
    page_table: Int[Array, "B C"],
    positions: Int[Array, "B T"],
    window: int | Int[Array, ""],
    sinks: Float[Array, "N"] | None = None,
    ahead: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T N H"]:
    """softmax(cap(q kᵀ * scale)) v over positions 0..p of the row's pages; zeros for p = -1.

    With `ahead`, over positions 0..ahead.
    """
    rules = spec.rules
    B, T, N, H = q.shape
    K, page_len = k_pages.shape[1:3]
    S = page_table.shape[1] * page_len

    def gather(array):
        out = rules.spec("batch", None, "kv_heads", *(None,) * (array.ndim - 2))
        return array.at[page_table].get(out_sharding=out)

    def keys(pages):  # [P, K, page, H] -> [B, K, S, H]
        rows = dequantize(jax.tree.map(gather, pages))
        heads = rules.spec("batch", "kv_heads", None, None)
        return jnp.reshape(jnp.swapaxes(rows, 1, 2), (B, K, S, H), out_sharding=heads)

    grouped = rules.spec("batch", None, "kv_heads", None, None)
    qg = jnp.reshape(q, (B, T, K, N // K, H), out_sharding=grouped).astype(jnp.float32)
    out = rules.spec("batch", "kv_heads", None, None, None)
    scores = spec.scores(jnp.einsum("BTKGH,BKSH->BKGTS", qg, keys(k_pages), out_sharding=out))
    last = positions if ahead is None else ahead
    key, distance = jnp.arange(S), positions[:, :, None] - jnp.arange(S)
    visible = (key <= last[:, :, None]) & ((distance < window) | (window <= 0))
    probs = softmax_with_sinks(jnp.where(visible[:, None, None], scores, MASKED), sinks)
    values = keys(k_pages if v_pages is None else v_pages)
    result = jnp.einsum("BKGTS,BKSH->BTKGH", probs, values, out_sharding=grouped)
    result = jnp.where(positions[:, :, None, None, None] >= 0, result, 0.0)
    heads = rules.spec("batch", None, "heads", None)
    return jnp.reshape(result, (B, T, N, H), out_sharding=heads).astype(q.dtype)
