"""Grouped-query attention of a layer."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxrl.models.config import AttentionConfig, DecoderConfig
from jaxrl.models.layers.linear import Linear, MakeParam, apply_linears
from jaxrl.models.layers.memory_order import row_major, row_major_gradient
from jaxrl.models.layers.norms import RMSNorm, rms_options, unit_rms
from jaxrl.models.layers.rope import growing_queries, rotate
from jaxrl.models.layers.row_ops import LayerPlace, RowOps
from sharding import Rules, target_platform


def prevent_norm_fusion(projected: jax.Array) -> jax.Array:
    """Identity, with an optimization barrier on TPU, in the backward pass as well.

    libtpu 0.0.51 aborts if it fuses a head's norm with the projection ("split of a padded window
    dim").
    """
    return jax.lax.optimization_barrier(projected) if target_platform() == "tpu" else projected


def has_plain_heads(cfg: AttentionConfig) -> bool:
    """Whether q, k and v are separate products without biases, and rope swaps halves of heads.

    Others are stored with tokens minor anyway, and copied twice (docs/concepts/kernels.md).
    """
    swaps_halves = cfg.rope.rotary == 1 and not cfg.rope.interleaved
    return swaps_halves and not (cfg.qkv_bias or cfg.qkv_fused)


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions; the caller passes the attention kernel."""

    def __init__(self, make: MakeParam, cfg: DecoderConfig, mixer: AttentionConfig):
        options: Any = dict(lora=cfg.lora, base_dtype=cfg.base_dtype)

        def project(name: str, letter: str, heads: int, axis: str, width: int = 1) -> Linear:
            eq = f"BTD,{letter}HD->BT{letter}H"
            shape, axes = (heads, width * mixer.H, cfg.D), (axis, None, "w_embed")
            bias, name = mixer.qkv_bias and name != "gate_proj", f"self_attn.{name}"
            return Linear(make, name, eq, shape, axes, bias=bias, **options)

        self.cfg = mixer.kind
        o_name, q_norm, k_norm = mixer.names
        fused = mixer.qkv_fused
        self.qkv = fused_projection(make, cfg, mixer, **options) if fused else None
        wide = mixer.gate and mixer.gate_in_q
        self.q = None if fused else project("q_proj", "N", mixer.N, "heads", 1 + wide)
        k, v = not (fused or mixer.reads_kv), not (fused or mixer.reads_kv or mixer.k_eq_v)
        self.k = project("k_proj", "K", mixer.K, "kv_heads") if k else None
        self.v = project("v_proj", "K", mixer.K, "kv_heads") if v else None
        apart = mixer.gate and not mixer.gate_in_q
        self.gate = project("gate_proj", "N", mixer.N, "heads") if apart else None
        self.o = Linear(
            make,
            f"self_attn.{o_name}",
            "BTNH,DNH->BTD",
            (cfg.D, mixer.N, mixer.H),
            ("w_embed", "heads", None),
            bias=mixer.o_bias,
            **options,
        )

        def norm(name: str, heads: int, axis: str) -> RMSNorm | None:
            if not mixer.qk_norm:
                return None
            how = rms_options(cfg)
            if mixer.joint_norm:
                return RMSNorm(make, name, heads * mixer.H, axis=axis, **how)
            return RMSNorm(make, name if mixer.norm_weights else None, mixer.H, **how)

        self.q_norm = norm(f"self_attn.{q_norm}", mixer.N, "heads")
        self.k_norm = None if mixer.reads_kv else norm(f"self_attn.{k_norm}", mixer.K, "kv_heads")
        self.v_eps = cfg.norm_eps if mixer.v_norm else None
        sinks = make("self_attn.sinks", (mixer.N,), ("heads",)) if mixer.sinks else None
        self.sinks = nnx.data(sinks)

    def __call__(self, x, positions, place: LayerPlace, window, rows: RowOps, state, rules: Rules):
        heads_first = rows.heads_first and has_plain_heads(self.cfg)
        q, k, v, *gates = self._project(x, heads_first, rules)
        gate = gates[0] if gates else None
        assert q is not None
        if self.cfg.gate and gate is None:
            q, gate = jnp.split(q, 2, axis=-1)
        q = self._normed(self.q_norm, q, "heads", rules)
        assert place.rotation is not None
        q = rotate(q, positions, place.rotation, heads_first=heads_first)
        if k is not None:
            k = self._normed(self.k_norm, k, "kv_heads", rules)
            k = rotate(k, positions, place.rotation, heads_first=heads_first)
        if v is not None and self.v_eps is not None:
            v = unit_rms(prevent_norm_fusion(v), self.v_eps).astype(v.dtype)
        if self.cfg.rope.query_growth:
            q = growing_queries(q, positions, self.cfg.rope)
        if self.cfg.shared is not None:
            k, v, state = rows.share(k, v, self.cfg.shared, state)
        spec = self.cfg.spec(rules)
        out, state = rows.attend(q, k, v, spec, window, place.cache, state, self.sinks)
        if heads_first:
            out = row_major_gradient(out)
        if gate is not None:
            out = out * jax.nn.sigmoid(gate)
        return checkpoint_name(self.o(out, rules), "o"), state

    def _project(self, x, heads_first: bool, rules: Rules) -> Sequence[jax.Array | None]:
        """Queries, with their gates if they are in q_proj, keys, values, and separate gates.

        Keys and values are None if they are those of an earlier layer. With `heads_first`
        products are stored for kernels that read heads first (memory_order.py).
        """
        if self.qkv is None:
            found = [self.q, self.k, self.v, self.gate]
            linears = [linear for linear in found if linear is not None]
            products = apply_linears(x, *linears, rules=rules)
            if heads_first:
                products = [row_major(product) for product in products]
            outs = iter(checkpoint_name(products, "qkv"))
            q, k, v, *gate = [None if linear is None else next(outs) for linear in found]
            return q, k, k if v is None else v, *filter(lambda a: a is not None, gate)
        H, width = self.cfg.H, self.cfg.N // self.cfg.K * self.cfg.H
        y = checkpoint_name(self.qkv(x, rules), "qkv")
        q, k, v = jnp.split(y, (width, width + H), axis=-1)
        shape, out = (*y.shape[:2], self.cfg.N, H), rules.spec("batch", "time", "heads", None)
        return jnp.reshape(q, shape, out_sharding=out), k, v

    def _normed(self, norm: RMSNorm | None, x: jax.Array, axis: str, rules: Rules) -> jax.Array:
        """Normalized heads [B, T, N, H], each alone or all together."""
        if norm is None:
            return x
        x = prevent_norm_fusion(x)
        if not self.cfg.joint_norm:
            return norm(x)
        flat = (*x.shape[:2], x.shape[2] * x.shape[3])
        joint = jnp.reshape(x, flat, out_sharding=rules.spec("batch", "time", axis))
        out = rules.spec("batch", "time", axis, None)
        return jnp.reshape(norm(joint), x.shape, out_sharding=out)


def fused_projection(
    make: MakeParam, cfg: DecoderConfig, mixer: AttentionConfig, **options: Any
) -> Linear:
    """The projection of queries, keys and values: for each kv head its queries, its key, its value.

    In files, all queries are first, then all keys, then all values.
    """
    width = mixer.N // mixer.K * mixer.H
    return Linear(
        make,
        "self_attn.qkv_proj",
        "BTD,KHD->BTKH",
        (mixer.K, width + 2 * mixer.H, cfg.D),
        ("kv_heads", None, "w_embed"),
        bias=mixer.qkv_bias,
        blocks=(width, mixer.H, mixer.H),
        **options,
    )
