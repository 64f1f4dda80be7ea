"""Causal attention over packed rows: one signature, one implementation per backend."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl.kernels.attention.blockwise import attention_blockwise
from jaxrl.kernels.attention.cudnn import attention_cudnn
from jaxrl.kernels.attention.limits import (
    MAX_LEN,
    unsupported_by_cudnn,
    unsupported_by_triton,
    unsupported_gpu,
)
from jaxrl.kernels.attention.reference import attention_reference
from jaxrl.kernels.attention_spec import AttentionSpec
from jaxrl.kernels.choice import Defaults, Implementations, choose
from jaxrl.kernels.visibility import Visibility
from sharding import Rules

IMPLEMENTATIONS: Implementations = {
    "blockwise": attention_blockwise,
    "cudnn": attention_cudnn,
    "reference": attention_reference,
    "splash": "jaxrl.kernels.attention.splash:attention_splash",
    "triton": "jaxrl.kernels.attention.triton:attention_triton",
}
DEFAULTS: Defaults = {
    "cpu": ("blockwise", "bitwise equal to decode over pages"),
    "gpu": ("triton", "Pallas kernels that keep scores on the chip"),
    "tpu": ("splash", "a Pallas kernel that keeps scores on the chip"),
}


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    *,
    spec: AttentionSpec,
    segments: Int[Array, "B T"],
    window: int | Int[Array, ""],
    visibility: Visibility | None = None,
    sinks: Float[Array, "N"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "B T N H"]:
    """Causal attention within each segment of packed rows.

    A query attends to the keys of its segment up to its own position; `window` > 0 keeps the last
    `window` of them, the query's own included. Scores are scaled, then soft-capped, in float32. A
    segment is one run of equal numbers in its row. Padding (segment 0) gives zeros. With
    `visibility` segments share prefixes (kernels/visibility.py). `sinks` are one more logit of
    each head, without a value (kernels/sinks.py).

    Rows sharded over `rules.time` are resharded over heads before attention and back after it
    (Ulysses, https://arxiv.org/abs/2309.14509), so implementations see whole rows. `implementation`
    is config.model.attention; None or "auto" selects by backend and shapes. Raises ValueError if
    the number of query heads does not divide over the devices that share them.
    """
    attend = choose(
        "config.model.attention",
        implementation,
        implementations=IMPLEMENTATIONS,
        defaults=attention_defaults(
            q, spec=spec, window=window, shared=visibility is not None, sinks=sinks is not None
        ),
    )
    rules, inside = spec.rules, spec.rules.whole_rows()
    k, v = (_repeat_kv_heads(x, q.shape[2], rules) for x in (k, v))
    whole = inside.spec("batch", "time", "heads", None)
    q, k, v = (jax.reshard(x, whole) for x in (q, k, v))
    rows = inside.spec("batch", "time")
    segments, visibility = jax.tree.map(lambda a: jax.reshard(a, rows), (segments, visibility))
    with jax.named_scope("attention"):
        inner = dataclasses.replace(spec, rules=inside)
        out = attend(
            q,
            k,
            v,
            spec=inner,
            segments=segments,
            window=window,
            visibility=visibility,
            sinks=sinks,
        )
    return jax.reshard(out, rules.spec("batch", "time", "heads", None))


def attention_defaults(
    q: jax.Array,
    *,
    spec: AttentionSpec,
    window: int | jax.Array,
    shared: bool,
    sinks: bool = False,
) -> Defaults:
    """The implementation for each backend, for these queries; `shared` prefixes or not.

    `sinks`: heads have sinks.
    """
    defaults = DEFAULTS
    if q.shape[1] > MAX_LEN:
        reason = f"plain XLA, because 'splash' does not support rows of {q.shape[1]} tokens"
        defaults = defaults | {"tpu": ("blockwise", reason)}
    if why := unsupported_by_triton(q):
        other = unsupported_by_cudnn(q, window, spec.softcap, sinks=sinks)
        other = "shared prefixes" if shared else other
        if other := other or unsupported_gpu():
            reason = f"plain XLA: 'triton' does not support {why}, and 'cudnn' not {other}"
            defaults = defaults | {"gpu": ("blockwise", reason)}
        else:
            reason = f"because 'triton' does not support {why}"
            defaults = defaults | {"gpu": ("cudnn", reason)}
    return defaults


def _repeat_kv_heads(
    x: Float[Array, "B T K H"], n_heads: int, rules: Rules
) -> Float[Array, "B T K2 H"]:
    """Keys or values with each head repeated as little as sharding over `attn_heads` requires."""
    B, T, K, H = x.shape
    n = rules.n_shards("attn_heads")
    if n_heads % n:
        shown = " x ".join(rules.mesh_axes("attn_heads"))
        raise ValueError(
            f"{n_heads} query heads cannot be shared by {n} devices ({shown}) in attention; set "
            f"config.mesh sizes whose product divides {n_heads}, or "
            "config.learner.sequence_parallel='ring'"
        )
    copies = math.lcm(K, n) // K
    if copies == 1:
        return x
    spec = rules.spec("batch", "time", "kv_heads", None, None)
    wide = jax.lax.broadcast_in_dim(x, (B, T, K, copies, H), (0, 1, 2, 4), out_sharding=spec)
    out = rules.spec("batch", "time", "kv_heads", None)
    return jnp.reshape(wide, (B, T, K * copies, H), out_sharding=out)
