"""Projectors of vision towers: the patches of each token as one vector of the decoder."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxrl.models.layers.linear import Linear, MakeParam
from jaxrl.models.layers.mlp import ACTIVATIONS
from jaxrl.models.layers.norms import LayerNorm, RMSNorm
from jaxrl.models.vision.config import NormConfig, TowerConfig
from sharding import Rules


def image_norm(
    make: MakeParam, name: str | None, dim: int, norm: NormConfig
) -> RMSNorm | LayerNorm:
    """A norm of a tower; without a name it has no weights."""
    if norm.rms or name is None:
        how: Any = dict(unit_offset=norm.unit_offset, round_last=norm.round_last)
        return RMSNorm(make, name, dim, eps=norm.eps, **how)
    return LayerNorm(make, name, dim, eps=norm.eps, bias=True)


class MLPMerger(nnx.Module):
    """W2 gelu(W1 x): x are the features of a token's patches, one after the other.

    The norm is one of each patch, or `joined` one of x.
    """

    def __init__(self, make: MakeParam, cfg: TowerConfig, part: str, *, joined: bool = False):
        merger, D = cfg.merger, cfg.merged_D
        self.n, self.joined = cfg.merge**2, joined
        self.norm = image_norm(make, merger.norm_name, D if joined else cfg.D, merger.norm)
        options: Any = dict(bias=True, lora=cfg.options(part).lora)
        first, second = merger.names
        self.first = Linear(make, first, "BTD,FD->BTF", (D, D), ("ffw", "w_embed"), **options)
        shape, axes = (cfg.out_D, D), ("w_embed", "ffw")
        self.second = Linear(make, second, "BTF,DF->BTD", shape, axes, **options)

    def __call__(self, x: Float[Array, "B P D"], rules: Rules) -> Float[Array, "B F O"]:
        out = rules.spec("batch", "time", "embed")
        x = grouped(x if self.joined else self.norm(x), self.n, rules)
        x = jnp.reshape(x, (*x.shape[:2], x.shape[2] * x.shape[3]), out_sharding=out)
        x = self.first(self.norm(x) if self.joined else x, rules)
        return jax.reshard(self.second(ACTIVATIONS["gelu"](x), rules), out)


class MeanMerger(nnx.Module):
    """W norm(s (a m - b)), where m is the mean of the features of a token's patches.

    Most have no a, b and s.
    """

    def __init__(self, make: MakeParam, cfg: TowerConfig, part: str):
        merger = cfg.merger
        self.n, self.scale = cfg.merge**2, merger.scale
        self.std_bias, self.std_scale = nnx.data(None), nnx.data(None)
        if merger.standard is not None:
            b, s = merger.standard
            self.std_bias = nnx.data(make(b, (cfg.D,), (None,), init="zeros"))
            self.std_scale = nnx.data(make(s, (cfg.D,), (None,), init="ones"))
        self.norm = image_norm(make, merger.norm_name, cfg.D, merger.norm)
        (name,), lora = merger.names, cfg.options(part).lora
        self.w, self.linear = nnx.data(None), nnx.data(None)
        if merger.transposed:
            self.w = nnx.data(make(name, (cfg.D, cfg.out_D), (None, "w_embed")))
        else:
            shape, axes = (cfg.out_D, cfg.D), ("w_embed", None)
            self.linear = Linear(make, name, "BTC,DC->BTD", shape, axes, lora=lora)

    def __call__(self, x: Float[Array, "B P D"], rules: Rules) -> Float[Array, "B F O"]:
        out = rules.spec("batch", "time", "embed")
        mean = grouped(x, self.n, rules).astype(jnp.float32).mean(axis=2) * self.scale
        if self.std_bias is not None and self.std_scale is not None:
            mean = mean - self.std_bias.astype(jnp.float32)
            mean = mean * self.std_scale.astype(jnp.float32)
        x = self.norm(mean.astype(x.dtype))
        if self.linear is not None:
            return jax.reshard(self.linear(x, rules), out)
        w = jax.reshard(self.w, rules.gathered(None, "w_embed"))
        return jnp.einsum("BTD,DO->BTO", x, w, out_sharding=out)


def grouped(x: Float[Array, "B P D"], n: int, rules: Rules) -> Float[Array, "B F n D"]:
    """The n patches of each token."""
    B, P, D = x.shape
    x = jax.reshard(x, rules.spec("batch", "time", "embed"))
    out = rules.spec("batch", "time", None, "embed")
    return jnp.reshape(x, (B, P // n, n, D), out_sharding=out)
