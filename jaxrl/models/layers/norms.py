"""Root-mean-square normalization (https://arxiv.org/abs/1910.07467) and layer normalization."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxrl.kernels.bits import materialize, row_sum, rsqrt
from jaxrl.models.config import DecoderConfig
from jaxrl.models.layers.linear import MakeParam


class RMSNorm(nnx.Module):
    """x / rms(x) * w, in float32; with `unit_offset` the scale is 1 + w (Gemma).

    Without a name it has no weights.
    """

    def __init__(
        self,
        make: MakeParam,
        name: str | None,
        dim: int,
        *,
        eps: float,
        unit_offset: bool,
        axis: str | None = None,
    ):
        self.eps, self.unit_offset = eps, unit_offset
        init = "zeros" if unit_offset else "ones"
        self.w = nnx.data(name and make(f"{name}.weight", (dim,), (axis,), init=init))

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        x32 = x.astype(jnp.float32)
        mean = row_sum(x32 * x32)[..., None] / x.shape[-1]
        normed = x32 * rsqrt(mean + self.eps)
        if self.w is None:
            return normed.astype(x.dtype)
        if self.unit_offset:  # Gemma scales before rounding, other families after
            return (normed * (1.0 + self.w.astype(jnp.float32))).astype(x.dtype)
        return normed.astype(x.dtype) * self.w


class LayerNorm(nnx.Module):
    """(x - mean(x)) / std(x) * w + b, in float32 (https://arxiv.org/abs/1607.06450)."""

    def __init__(self, make: MakeParam, name: str, dim: int, *, eps: float, bias: bool):
        self.eps = eps
        self.w = nnx.data(make(f"{name}.weight", (dim,), (None,), init="ones"))
        self.b = nnx.data(make(f"{name}.bias", (dim,), (None,), init="zeros") if bias else None)

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        x32 = x.astype(jnp.float32)
        centered = materialize(x32 - row_sum(x32)[..., None] / x.shape[-1])
        variance = row_sum(centered * centered)[..., None] / x.shape[-1]
        scaled = centered * rsqrt(variance + self.eps) * self.w.astype(jnp.float32)
        if self.b is not None:
            scaled = materialize(scaled) + self.b.astype(jnp.float32)
        return scaled.astype(x.dtype)


def make_norm(
    make: MakeParam,
    name: str,
    cfg: DecoderConfig,
    *,
    eps: float | None = None,
    unit_offset: bool | None = None,
) -> RMSNorm | LayerNorm:
    """A norm of the residual stream, as the config says where the arguments are None."""
    eps = cfg.norm_eps if eps is None else eps
    if cfg.layer_norm:
        return LayerNorm(make, name, cfg.D, eps=eps, bias=cfg.norm_bias)
    unit_offset = cfg.unit_offset if unit_offset is None else unit_offset
    return RMSNorm(make, name, cfg.D, eps=eps, unit_offset=unit_offset)
