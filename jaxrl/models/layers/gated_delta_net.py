"""Gated DeltaNet: a layer whose memory of a sequence is a matrix per head, of constant size."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxrl.kernels.bits import row_sum, rsqrt
from jaxrl.models.config import DecoderConfig
from jaxrl.models.layers.linear import Linear, MakeParam, apply_linears
from jaxrl.models.layers.norms import RMSNorm
from jaxrl.models.layers.row_ops import LayerPlace, RowOps
from jaxrl.models.state_mixers import GatedDeltaNetConfig
from sharding import Rules


class GatedDeltaNet(nnx.Module):
    """Linear attention with the gated delta rule (https://arxiv.org/abs/2412.06464).

    Queries, keys and values pass a causal convolution. beta = sigmoid(b x) is how far a token
    replaces what its key finds in the state, exp(g) with g = -exp(A_log) softplus(a x + dt_bias)
    how far the state is kept. The output of a head is normalized and multiplied by silu(z x). The
    caller passes the operations on rows, as for attention.
    """

    def __init__(self, make: MakeParam, cfg: DecoderConfig, mixer: GatedDeltaNetConfig):
        options: Any = dict(lora=cfg.lora, base_dtype=cfg.base_dtype)
        K, N, D, V = mixer.K, mixer.N, mixer.D, mixer.V
        self.cfg = mixer
        # Of one key head: its query, its key, and the values of all heads that share them.
        self.blocks = (D, D, N // K * V)
        width = sum(self.blocks)

        def project(name: str, eq: str, shape: tuple[int, ...], **more: Any) -> Linear:
            axes = ("heads", *(None,) * (len(shape) - 1), "w_embed")
            return Linear(make, f"linear_attn.{name}", eq, (*shape, cfg.D), axes, **options, **more)

        by_key = "BTD,KCD->BTKC"
        if mixer.fused:
            self.qkvz = project("in_proj_qkvz", by_key, (K, width + N // K * V))
            self.ba = project("in_proj_ba", by_key, (K, 2 * N // K))
        else:
            self.qkv = project("in_proj_qkv", by_key, (K, width), blocks=self.blocks)
            self.z = project("in_proj_z", "BTD,NVD->BTNV", (N, V))
            self.b = project("in_proj_b", "BTD,ND->BTN", (N,))
            self.a = project("in_proj_a", "BTD,ND->BTN", (N,))

        def parameter(name: str, shape: tuple[int, ...], **more: Any) -> Any:
            axes = ("heads", *(None,) * (len(shape) - 1))
            return nnx.data(make(f"linear_attn.{name}", shape, axes, **more))

        file_shape = (K * width, 1, mixer.conv_len)
        self.conv = parameter(
            "conv1d.weight", (K, width, mixer.conv_len), hf_shape=file_shape, blocks=self.blocks
        )
        self.a_log = parameter("A_log", (N,), init="log_decay")
        self.dt_bias = parameter("dt_bias", (N,), init="ones")
        self.norm = RMSNorm(make, "linear_attn.norm", V, eps=cfg.norm_eps, unit_offset=False)
        self.o = Linear(
            make,
            "linear_attn.out_proj",
            "BTNV,DNV->BTD",
            (cfg.D, N, V),
            ("w_embed", "heads", None),
            **options,
        )

    def __call__(self, x, positions, place: LayerPlace, window, rows: RowOps, state, rules: Rules):
        qkv, z, b, a = self._project(x, rules)
        D, (B, T, N, V) = self.cfg.D, z.shape
        heads = rules.spec("batch", "time", "heads", None)
        q, k, v = jnp.split(qkv, (D, 2 * D), axis=-1)
        v = jnp.reshape(v, (B, T, N, V), out_sharding=heads)
        w_qk, w_v = jnp.split(self._whole(self.conv, rules, 3), (2 * D,), axis=1)
        w_v = jnp.reshape(w_v, (N, V, -1), out_sharding=rules.gathered("heads", None, None))
        decay = jnp.exp(self._whole(self.a_log, rules, 1).astype(jnp.float32))
        shift = self._whole(self.dt_bias, rules, 1).astype(jnp.float32)
        g = -decay * jax.nn.softplus(a.astype(jnp.float32) + shift)
        beta = jax.nn.sigmoid(b)
        qk = jnp.concatenate([q, k], axis=-1)
        out, state = rows.delta(qk, v, g, beta, (w_qk, w_v), place.cache, state)
        gated = self.norm(out).astype(jnp.float32) * jax.nn.silu(z.astype(jnp.float32))
        return checkpoint_name(self.o(gated.astype(x.dtype), rules), "o"), state

    def _project(self, x, rules: Rules) -> list[jax.Array]:
        """Queries, keys and values by key head [B, T, K, C], z [B, T, N, V], b and a [B, T, N]."""
        if not self.cfg.fused:
            projected = apply_linears(x, self.qkv, self.z, self.b, self.a, rules=rules)
            return checkpoint_name(projected, "qkv")
        projected = apply_linears(x, self.qkvz, self.ba, rules=rules)
        qkvz, ba = checkpoint_name(projected, "qkv")
        (B, T), N, V = qkvz.shape[:2], self.cfg.N, self.cfg.V
        heads = rules.spec("batch", "time", "heads", None)
        qkv, z = jnp.split(qkvz, (sum(self.blocks),), axis=-1)
        z = jnp.reshape(z, (B, T, N, V), out_sharding=heads)
        b, a = (
            jnp.reshape(part, (B, T, N), out_sharding=rules.spec("batch", "time", "heads"))
            for part in jnp.split(ba, 2, axis=-1)
        )
        return [qkv, z, b, a]

    def _whole(self, w: jax.Array, rules: Rules, n_dims: int) -> jax.Array:
        return jax.reshard(w, rules.gathered("heads", *(None,) * (n_dims - 1)))


def queries_and_keys(qk: Float[Array, "B T K D2"]) -> list[Float[Array, "B T K D"]]:
    """The two halves of the features, each head divided by its norm: x / sqrt(x·x + 1e-6)."""

    def normalize(x: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        return (x32 * rsqrt(row_sum(x32 * x32)[..., None] + 1e-6)).astype(x.dtype)

    return [normalize(half) for half in jnp.split(qk, 2, axis=-1)]
