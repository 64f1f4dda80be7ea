"""Ring attention on TPU; JAX's splash kernels compute its blocks."""

import functools

from jaxtyping import Array, Float, Int

from jaxrl.kernels.attention.splash import SplashBlocks, check_row_len, scaled
from jaxrl.kernels.attention_spec import AttentionSpec
from jaxrl.kernels.choice import check_platform
from jaxrl.kernels.ring_attention.block_kernel import ranges_of_rows, ring_in_blocks
from jaxrl.kernels.ring_attention.ring import shard_ring
from jaxrl.kernels.visibility import Visibility


def ring_splash(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    *,
    spec: AttentionSpec,
    segments: Int[Array, "B T"],
    window: int | Int[Array, ""],
    visibility: Visibility | None = None,
    sinks: Float[Array, "N"] | None = None,
    interpret: bool = False,
) -> Float[Array, "B T N H"]:
    """softmax(cap(q kᵀ * scale)) v; each device keeps its queries.

    `interpret` emulates the kernel with XLA on any backend. Raises NotImplementedError without a
    TPU and for more than 65,536 tokens per place of the ring.
    """
    if not interpret:
        check_platform("config.model.attention", "splash", "tpu")
    check_row_len(q.shape[1] // spec.rules.ring_size)
    attend = functools.partial(ring_in_blocks, SplashBlocks(spec, interpret))
    return shard_ring(
        attend,
        q,
        scaled(k, spec),
        v,
        spec=spec,
        segments=segments,
        window=window,
        visibility=visibility,
        sinks=sinks,
        masks=ranges_of_rows,
    )
