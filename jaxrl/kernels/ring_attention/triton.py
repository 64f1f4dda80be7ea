"""Ring attention on NVIDIA GPUs; the packed kernels compute its blocks."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl.kernels.attention import triton
from jaxrl.kernels.attention.limits import BLOCK
from jaxrl.kernels.attention.online_softmax import MASKED
from jaxrl.kernels.attention.triton_masks import RangeMask
from jaxrl.kernels.attention_spec import AttentionSpec
from jaxrl.kernels.ring_attention.block_kernel import ranges_of_rows, ring_in_blocks
from jaxrl.kernels.ring_attention.ring import shard_ring
from jaxrl.kernels.visibility import Visibility


@dataclasses.dataclass(frozen=True)
class TritonBlocks:
    """kernels/attention/triton.py as a `BlockKernel`."""

    kernels: triton.Kernels
    heads_first: bool = False
    block: int = BLOCK

    def forward(self, q, k, v, first, last) -> tuple[jax.Array, jax.Array]:
        out, norm = triton.forward(self.kernels, q, k, v, RangeMask(first, last))
        return out, norm.swapaxes(1, 2)

    def backward(self, q, k, v, out, norm, d_out, first, last) -> tuple[jax.Array, ...]:
        # Padding after the row has no gradient, but its denominator must be finite.
        norm = jnp.where(norm > MASKED, norm, 0.0).swapaxes(1, 2)
        mask = RangeMask(first, last)
        return triton.backward(self.kernels, q, k, v, out, norm, d_out, mask)


def ring_triton(
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
    block: int | None = None,
) -> Float[Array, "B T N H"]:
    """softmax(cap(q kᵀ * scale)) v; each device keeps its queries.

    `interpret`, `block` and errors are those of `attention_triton`.
    """
    triton.check_triton(q, interpret)
    kernels = triton.Kernels(spec, interpret, block)
    attend = functools.partial(ring_in_blocks, TritonBlocks(kernels))
    return shard_ring(
        attend,
        q,
        k,
        v,
        spec=spec,
        segments=segments,
        window=window,
        visibility=visibility,
        sinks=sinks,
        masks=ranges_of_rows,
    )
