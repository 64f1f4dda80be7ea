"""Causal attention over packed rows that stay sharded along time: keys travel, queries do not."""

import jax
from jaxtyping import Array, Float, Int

from jaxrl.kernels.attention_spec import AttentionSpec
from jaxrl.kernels.choice import choose
from jaxrl.kernels.ring_attention.blockwise import ring_blockwise
from jaxrl.kernels.ring_attention.reference import ring_reference

IMPLEMENTATIONS = {"blockwise": ring_blockwise, "reference": ring_reference}
PLANNED = {name: "as a ring step" for name in ("splash", "triton", "cudnn")}
DEFAULTS = {name: ("blockwise", "the only ring kernel") for name in ("cpu", "gpu", "tpu")}


def ring_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    *,
    spec: AttentionSpec,
    segments: Int[Array, "B T"],
    window: int | Int[Array, ""],
    implementation: str | None = None,
) -> Float[Array, "B T N H"]:
    """`attention` on rows sharded over `rules.time` in zig-zag order (sharding/order.py).

    Ring attention, https://arxiv.org/abs/2310.01889: in n steps the keys and values of every device
    visit all others. Causality, segments and windows follow the original token order of the row.
    `implementation` is config.model.attention; None or "auto" selects by backend.
    """
    attend = choose(
        "config.model.attention",
        implementation,
        implementations=IMPLEMENTATIONS,
        planned=PLANNED,
        defaults=DEFAULTS,
    )
    with jax.named_scope("ring_attention"):
        return attend(q, k, v, spec=spec, segments=segments, window=window)
