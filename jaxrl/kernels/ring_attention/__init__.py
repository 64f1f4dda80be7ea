"""Causal attention over packed rows that stay sharded along time: keys travel, queries do not."""

import jax
from jaxtyping import Array, Float, Int

from jaxrl.kernels.attention.limits import MAX_LEN, unsupported_by_triton
from jaxrl.kernels.attention_spec import AttentionSpec
from jaxrl.kernels.choice import Defaults, Implementations, choose
from jaxrl.kernels.ring_attention.blockwise import ring_blockwise
from jaxrl.kernels.ring_attention.reference import ring_reference
from jaxrl.kernels.visibility import Visibility

IMPLEMENTATIONS: Implementations = {
    "blockwise": ring_blockwise,
    "reference": ring_reference,
    "splash": "jaxrl.kernels.ring_attention.splash:ring_splash",
    "triton": "jaxrl.kernels.ring_attention.triton:ring_triton",
}
DEFAULTS: Defaults = {
    "cpu": ("blockwise", "plain XLA"),
    "gpu": ("triton", "Pallas kernels that keep scores on the chip"),
    "tpu": ("splash", "a Pallas kernel that keeps scores on the chip"),
}


def ring_attention(
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
    """`attention` on rows sharded over `rules.time` in zig-zag order (sharding/rules.py).

    Ring attention, https://arxiv.org/abs/2310.01889: in n steps the keys and values of every device
    visit all others. Causality, segments, windows and `visibility` follow the order of the row.
    The `sinks` of heads are those of `attention`.
    `implementation` is config.model.attention; None or "auto" selects by backend and shapes.
    """
    attend = choose(
        "config.model.attention",
        implementation,
        implementations=IMPLEMENTATIONS,
        defaults=ring_defaults(q, q.shape[1] // spec.rules.ring_size),
    )
    with jax.named_scope("ring_attention"):
        return attend(
            q,
            k,
            v,
            spec=spec,
            segments=segments,
            window=window,
            visibility=visibility,
            sinks=sinks,
        )


def ring_defaults(q: jax.Array, n_tokens: int) -> Defaults:
    """The implementation for each backend, for these queries with `n_tokens` on each device."""
    defaults = DEFAULTS
    if n_tokens > MAX_LEN:
        reason = f"plain XLA, because 'splash' does not support {n_tokens} tokens per device"
        defaults = defaults | {"tpu": ("blockwise", reason)}
    if why := unsupported_by_triton(q):
        reason = f"plain XLA, because 'triton' does not support {why}"
        defaults = defaults | {"gpu": ("blockwise", reason)}
    return defaults
