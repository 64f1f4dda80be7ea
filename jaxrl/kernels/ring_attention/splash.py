"""Ring attention on TPU; JAX's splash kernels compute its blocks.

The forward pass of the kernels also returns the log of the softmax denominators. Their backward
pass takes the output and the denominators of all keys in place of those of the block.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jaxtyping import Array, Float, Int

from jaxrl.kernels.attention.blocks import MASKED
from jaxrl.kernels.attention.splash import BLOCKS, check_row_len, make_kernel
from jaxrl.kernels.attention_spec import AttentionSpec
from jaxrl.kernels.choice import check_platform
from jaxrl.kernels.ring_attention.blocks import ring_in_blocks
from jaxrl.kernels.ring_attention.ring import shard_ring
from jaxrl.kernels.visibility import Visibility, check_separate


@dataclasses.dataclass(frozen=True)
class SplashBlocks:
    """Splash attention as a `BlockKernel`; queries are scaled before."""

    spec: AttentionSpec
    interpret: bool
    heads_first: bool = True
    block: int = BLOCKS[-1]

    def forward(self, q, k, v, first, last) -> tuple[jax.Array, jax.Array]:
        def row(args):
            *qkv, first, last = args
            kernel = make_kernel(self.spec, self.interpret, first, last, save_residuals=True)
            out, (norm,) = kernel(*qkv)
            return out, norm

        out, norm = lax.map(row, (q, k, v, first, last))
        seen = norm > MASKED  # else the mean is that of all keys, or 0 / 0
        return jnp.where(seen[..., None], out, 0), jnp.where(seen, norm, MASKED)

    def backward(self, q, k, v, out, norm, d_out, first, last) -> tuple[jax.Array, ...]:
        def row(args):
            q, k, v, out, norm, d_out, first, last = args
            kernel = make_kernel(self.spec, self.interpret, first, last)
            saved = q, k, v, None, None, out, norm, kernel.dq_mask_info, kernel.dkv_mask_info
            # The library has no public backward pass with given denominators.
            return splash._splash_attention_bwd(**kernel.kwargs, res=saved, do=d_out)[3:6]

        # Padding after the row has no gradient, but its denominator must be finite.
        norm = jnp.where(norm > MASKED, norm, 0.0)
        return lax.map(row, (q, k, v, out, norm, d_out, first, last))


def ring_splash(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    *,
    spec: AttentionSpec,
    segments: Int[Array, "B T"],
    window: int | Int[Array, ""],
    visibility: Visibility | None = None,
    interpret: bool = False,
) -> Float[Array, "B T N H"]:
    """softmax(cap(q kᵀ * scale)) v; each device keeps its queries.

    `interpret` emulates the kernel with XLA on any backend. Raises NotImplementedError without a
    TPU and for more than 65,536 tokens per place of the ring.
    """
    if not interpret:
        check_platform("config.model.attention", "splash", "tpu")
    check_separate("splash", visibility)
    check_row_len(q.shape[1] // spec.rules.ring_size)
    attend = functools.partial(ring_in_blocks, SplashBlocks(spec, interpret))
    q = (q.astype(jnp.float32) * spec.scale).astype(q.dtype)
    return shard_ring(attend, q, k, v, spec=spec, segments=segments, window=window)
