"""Ring attention as one would write it on paper: rows brought together, in their own order."""

import dataclasses

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from jaxrl.kernels.attention.reference import attention_reference
from sharding import Rules, zigzag


def ring_reference(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    *,
    segments: Int[Array, "B T"],
    window: int | Int[Array, ""],
    softcap: float | None,
    scale: float,
    rules: Rules,
) -> Float[Array, "B T N H"]:
    """Attention over whole rows on every device of the ring."""
    whole = dataclasses.replace(rules, time=None, ring=False)
    order = zigzag(q.shape[1], rules.n_shards("time"))

    def take(x, places, *logical):
        spec = whole.spec("batch", None, *logical)
        return jax.reshard(x, spec).at[:, places].get(out_sharding=spec)

    back = np.argsort(order)
    out = attention_reference(
        take(q, back, "heads", None),
        take(k, back, "kv_heads", None),
        take(v, back, "kv_heads", None),
        segments=take(segments, back),
        window=window,
        softcap=softcap,
        scale=scale,
        rules=whole,
    )
    return jax.reshard(take(out, order, "heads", None), rules.spec("batch", "time", "heads", None))
