"""Root-mean-square normalization (https://arxiv.org/abs/1910.07467) and layer normalization."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxrl.kernels.bits import materialize, row_sum, rsqrt
from jaxrl.models.config import DecoderConfig
from jaxrl.models.layers.linear import MakeParam


class RMSNorm(nnx.Module):
    """x / rms(x) * w, in float32; with `unit_offset` the scale is 1 + w (Gemma 1 to 3).

    The quotient is rounded to the dtype of x before it is scaled, or with `round_last` after it.
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
        round_last: bool = False,
        axis: str | None = None,
    ):
        self.eps, self.unit_offset, self.round_last = eps, unit_offset, round_last
        init = "zeros" if unit_offset else "ones"
        w = None if name is None else make(f"{name}.weight", (dim,), (axis,), init=init)
        self.w = nnx.data(w)

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        normed = unit_rms(x, self.eps)
        if self.w is None:
            return normed.astype(x.dtype)
        if self.unit_offset:  # Gemma scales before rounding, other families after
            return (normed * (1.0 + self.w.astype(jnp.float32))).astype(x.dtype)
        if self.round_last:
            return materialize((normed * self.w.astype(jnp.float32)).astype(x.dtype))
        return normed.astype(x.dtype) * self.w


def unit_rms(x: Float[Array, "*B D"], eps: float) -> Float[Array, "*B D"]:
    """x / rms(x) in float32, without a scale."""
    x32 = x.astype(jnp.float32)
    mean = row_sum(x32 * x32)[..., None] / x.shape[-1]
    return x32 * rsqrt(mean + eps)


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
    how: dict[str, Any] = rms_options(cfg) | dict(eps=eps)
    if unit_offset is not None:
        how["unit_offset"] = unit_offset
    return RMSNorm(make, name, cfg.D, **how)


def rms_options(cfg: DecoderConfig) -> dict[str, Any]:
    """The options of all RMSNorms of a model."""
    return dict(eps=cfg.norm_eps, unit_offset=cfg.unit_offset, round_last=cfg.norm_rounds_last)
