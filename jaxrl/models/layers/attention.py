"""Grouped-query attention of a layer."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxrl.models.config import AttentionConfig, DecoderConfig
from jaxrl.models.layers.linear import Linear, MakeParam, apply_linears
from jaxrl.models.layers.norms import RMSNorm
from jaxrl.models.layers.rope import rotate
from jaxrl.models.layers.row_ops import LayerPlace, RowOps
from sharding import Rules, target_platform


def prevent_norm_fusion(projected: jax.Array) -> jax.Array:
    """Identity, with an optimization barrier on TPU, in the backward pass as well.

    libtpu 0.0.51 aborts if it fuses a head's norm with the projection ("split of a padded window
    dim").
    """
    return jax.lax.optimization_barrier(projected) if target_platform() == "tpu" else projected


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions; the caller passes the attention kernel."""

    def __init__(self, make: MakeParam, cfg: DecoderConfig, mixer: AttentionConfig):
        options: Any = dict(lora=cfg.lora, base_dtype=cfg.base_dtype)

        def project(name: str, letter: str, heads: int, axis: str, width: int = 1) -> Linear:
            eq = f"BTD,{letter}HD->BT{letter}H"
            shape, axes = (heads, width * mixer.H, cfg.D), (axis, None, "w_embed")
            return Linear(make, name, eq, shape, axes, bias=mixer.qkv_bias, **options)

        self.cfg = mixer.kind
        self.q = project("self_attn.q_proj", "N", mixer.N, "heads", 1 + mixer.gate)
        self.k = project("self_attn.k_proj", "K", mixer.K, "kv_heads")
        self.v = project("self_attn.v_proj", "K", mixer.K, "kv_heads")
        self.o = Linear(
            make,
            "self_attn.o_proj",
            "BTNH,DNH->BTD",
            (cfg.D, mixer.N, mixer.H),
            ("w_embed", "heads", None),
            bias=mixer.o_bias,
            **options,
        )

        def norm(name: str) -> RMSNorm | None:
            if not mixer.qk_norm:
                return None
            return RMSNorm(make, name, mixer.H, eps=cfg.norm_eps, unit_offset=cfg.unit_offset)

        self.q_norm, self.k_norm = norm("self_attn.q_norm"), norm("self_attn.k_norm")

    def __call__(self, x, positions, place: LayerPlace, window, rows: RowOps, state, rules: Rules):
        projected = apply_linears(x, self.q, self.k, self.v, rules=rules)
        q, k, v = checkpoint_name(projected, "qkv")
        gate = None
        if self.cfg.gate:
            q, gate = jnp.split(q, 2, axis=-1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(prevent_norm_fusion(q)), self.k_norm(prevent_norm_fusion(k))
        assert place.rotation is not None
        q, k = rotate(q, positions, place.rotation), rotate(k, positions, place.rotation)
        out, state = rows.attend(q, k, v, self.cfg.spec(rules), window, place.cache, state)
        if gate is not None:
            out = out * jax.nn.sigmoid(gate)
        return checkpoint_name(self.o(out, rules), "o"), state
