"""Reference ring attention: rows gathered on every device, in their original order."""

import dataclasses

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from jaxrl.kernels.attention.reference import attention_reference
from jaxrl.kernels.attention_spec import AttentionSpec
from jaxrl.kernels.visibility import Visibility
from sharding import zigzag


def ring_reference(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    *,
    spec: AttentionSpec,
    segments: Int[Array, "B T"],
    window: int | Int[Array, ""],
    visibility: Visibility | None = None,
    sinks: Float[Array, "N"] | None = None,
) -> Float[Array, "B T N H"]:
    """Attention over whole rows on every device of the ring."""
    rules = spec.rules
    whole = dataclasses.replace(rules, time=None, ring=False)
    order = zigzag(q.shape[1], rules.ring_size)

    def take(x, order_of_row, *logical):
        sharding = whole.spec("batch", None, *logical)
        return jax.reshard(x, sharding).at[:, order_of_row].get(out_sharding=sharding)

    back = np.argsort(order)
    out = attention_reference(
        take(q, back, "heads", None),
        take(k, back, "kv_heads", None),
        take(v, back, "kv_heads", None),
        spec=dataclasses.replace(spec, rules=whole),
        segments=take(segments, back),
        window=window,
        visibility=jax.tree.map(lambda a: take(a, back), visibility),
        sinks=sinks,
    )
    return jax.reshard(take(out, order, "heads", None), rules.spec("batch", "time", "heads", None))
