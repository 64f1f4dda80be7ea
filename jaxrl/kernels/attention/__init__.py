"""Causal attention over packed rows: one signature, one implementation per backend."""

from jaxtyping import Array, Float, Int

from jaxrl.kernels.attention.reference import attention_reference
from sharding import Rules


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    *,
    segments: Int[Array, "B T"],
    window: int | Int[Array, ""],
    softcap: float | None,
    scale: float,
    rules: Rules,
    implementation: str | None = None,
) -> Float[Array, "B T N H"]:
    """Each query attends to the keys of its own segment at or before it; `window` > 0 keeps the last
    `window` of them, itself included. Scores are scaled, then soft-capped, in float32."""
    return attention_reference(
        q, k, v, segments=segments, window=window, softcap=softcap, scale=scale, rules=rules
    )
