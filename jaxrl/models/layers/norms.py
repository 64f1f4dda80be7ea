"""Root-mean-square normalization (https://arxiv.org/abs/1910.07467)."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxrl.kernels.bits import row_sum, rsqrt
from jaxrl.models.layers.linear import MakeParam


class RMSNorm(nnx.Module):
    """x / rms(x) * w, in float32; with `unit_offset` the scale is 1 + w (Gemma)."""

    def __init__(self, make: MakeParam, name: str, dim: int, *, eps: float, unit_offset: bool):
        self.eps, self.unit_offset = eps, unit_offset
        init = "zeros" if unit_offset else "ones"
        self.w = nnx.data(make(f"{name}.weight", (dim,), (None,), init=init))

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        x32 = x.astype(jnp.float32)
        mean = row_sum(x32 * x32)[..., None] / x.shape[-1]
        normed = x32 * rsqrt(mean + self.eps)
        if self.unit_offset:  # Gemma scales before rounding, other families after
            return (normed * (1.0 + self.w.astype(jnp.float32))).astype(x.dtype)
        return normed.astype(x.dtype) * self.w
