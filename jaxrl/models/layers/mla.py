"""Multi-head latent attention: keys and values of all heads are linear maps of one latent."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxrl.models.config import DecoderConfig, MLAConfig
from jaxrl.models.layers.linear import Linear, MakeParam, apply_linears, own_part
from jaxrl.models.layers.norms import RMSNorm
from jaxrl.models.layers.rope import rotate
from jaxrl.models.layers.row_ops import LayerPlace, RowOps
from jaxrl.models.layers.stored import QUANTIZED, dense, gather_stored
from sharding import Rules

NORM_EPS = 1e-6  # of the norms of both ranks, whatever `rms_norm_eps` is (transformers' class)


class MLA(nnx.Module):
    """Multi-head latent attention (https://arxiv.org/abs/2405.04434, section 2.1).

    A token has a latent c = norm(W_a x) and a rotated key r, which all heads share. Head n has the
    key [K_n c, r] and the value V_n c; K and V are the rows of kv_b_proj. The caller passes the
    attention kernel, and either expands the latents of rows or keeps them (`LatentHeads`).
    """

    def __init__(self, make: MakeParam, cfg: DecoderConfig, mixer: MLAConfig):
        options: Any = dict(lora=cfg.lora, base_dtype=cfg.base_dtype)
        D, N, H, V = cfg.D, mixer.N, mixer.H, mixer.V

        def to_rank(name: str, rank: int) -> Linear:
            axes = (None, "w_embed")
            name = f"self_attn.{name}"
            return Linear(make, name, "BTD,RD->BTR", (rank, D), axes, bias=mixer.bias, **options)

        def to_heads(name: str, width: int, rank: int) -> Linear:
            shape, axes = (N, width, rank), ("heads", None, "w_embed")
            return Linear(make, f"self_attn.{name}", "BTR,NHR->BTNH", shape, axes, **options)

        def norm(name: str, rank: int) -> RMSNorm:
            return RMSNorm(make, f"self_attn.{name}", rank, eps=NORM_EPS, unit_offset=False)

        self.cfg, rank = mixer.kind, mixer.q_rank
        self.q_a = to_rank("q_a_proj", rank) if rank else None
        self.q_norm = norm("q_a_layernorm", rank) if rank else None
        self.q = to_heads("q_b_proj" if rank else "q_proj", H, rank or D)
        self.kv_a = to_rank("kv_a_proj_with_mqa", mixer.page_features)
        self.kv_norm = norm("kv_a_layernorm", mixer.latent)
        self.kv_b = to_heads("kv_b_proj", mixer.nope + V, mixer.latent)
        shape, axes = (D, N, V), ("w_embed", "heads", None)
        eq, name = "BTNV,DNV->BTD", "self_attn.o_proj"
        self.o = Linear(make, name, eq, shape, axes, bias=mixer.bias, **options)

    def __call__(self, x, positions, place: LayerPlace, window, rows: RowOps, state, rules: Rules):
        q, c = self._project(x, rules)
        c, r = jnp.split(c, (self.cfg.latent,), axis=-1)
        q, q_rotated = jnp.split(q, (self.cfg.nope,), axis=-1)
        assert place.rotation is not None
        q = jnp.concatenate([q, rotate(q_rotated, positions, place.rotation)], axis=-1)
        r = rotate(r[:, :, None], positions, place.rotation)
        latent = jnp.concatenate([self.kv_norm(c)[:, :, None], r], axis=-1)
        heads = LatentHeads(self.kv_b, self.cfg, rules)
        out, state = rows.attend_latent(q, latent, heads, window, place.cache, state)
        return checkpoint_name(self.o(out, rules), "o"), state

    def _project(self, x, rules: Rules) -> tuple[jax.Array, jax.Array]:
        """Queries [B, T, N, H]; latents before their norm and keys before their rotation."""
        if self.q_a is None or self.q_norm is None:
            q, c = self.q(x, rules), self.kv_a(x, rules)
            return checkpoint_name((q, c), "qkv")
        ranks = apply_linears(x, self.q_a, self.kv_a, rules=rules)
        q, c = checkpoint_name(ranks, "qkv")
        return checkpoint_name(self.q(self.q_norm(q), rules), "qkv"), c


@dataclasses.dataclass(frozen=True)
class LatentHeads:
    """The keys and values of all heads, as maps of latents.

    `expand` is the form on rows. As q·(K c) = (Kᵀ q)·c, and a mean of V c is V times the mean of c,
    attention may also run on the latents themselves (`absorb`, `values`): one key head, whose
    values are the first features of its keys. The weights include those of an adapter.
    """

    kv_b: Linear
    cfg: MLAConfig
    rules: Rules

    def expand(
        self, latent: Float[Array, "B T 1 C"]
    ) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N V"]]:
        """Keys and values of all heads."""
        c, r = jnp.split(latent[:, :, 0], (self.cfg.latent,), axis=-1)
        k, v = jnp.split(self.kv_b(c, self.rules), (self.cfg.nope,), axis=-1)
        shape, out = (*k.shape[:3], r.shape[-1]), self._spec("heads", None)
        r = jax.lax.broadcast_in_dim(r, shape, (0, 1, 3), out_sharding=out)
        return jnp.concatenate([k, r], axis=-1), v

    def absorb(self, q: Float[Array, "B T N H"]) -> Float[Array, "B T N C"]:
        """Queries of latents: [Kᵀ q, rotated q]."""
        q, rotated = jnp.split(q, (self.cfg.nope,), axis=-1)
        keys = slice(0, self.cfg.nope)
        q = self._scaled(q, keys)
        y = self._product("BTNH,NHR->BTNR", q, self._weight(q.dtype)[:, keys])
        if self.kv_b.lora is not None:
            a, b = self._factors(keys)
            low = self._product("BTNH,NHR->BTNR", q, b)
            y = y + self._product("BTNR,RC->BTNC", self._own(low), a)
        return jnp.concatenate([y, rotated], axis=-1)

    def values(self, c: Float[Array, "B T N R"]) -> Float[Array, "B T N V"]:
        """V c, of the mean latent of each head."""
        of_values = slice(self.cfg.nope, None)
        y = self._product("BTNR,NHR->BTNH", c, self._weight(c.dtype)[:, of_values])
        if self.kv_b.lora is not None:
            a, b = self._factors(of_values)
            low = self._product("BTNC,RC->BTNR", c, a)
            y = y + self._product("BTNR,NHR->BTNH", self._own(low), b)
        return self._scaled(y, of_values)

    def _spec(self, *rest: str | None) -> jax.P:
        return self.rules.spec("batch", "time", *rest)

    def _product(self, eq: str, x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.einsum(eq, x, w, out_sharding=self._spec("heads", None))

    def _weight(self, dtype: Any) -> jax.Array:
        """[N, H, R] of the base, gathered over the axes that shard only parameters."""
        w, axes = self.kv_b.w, self.kv_b.axes
        if isinstance(w, QUANTIZED):
            return dense(gather_stored(w, self.rules, axes, 1), dtype)
        return jax.reshard(w, self.rules.gathered(*axes))

    def _factors(self, part: slice) -> tuple[jax.Array, jax.Array]:
        """(scale A [R, C], the rows of B [N, H, R] of a part of each head)."""
        lora = self.kv_b.lora
        assert lora is not None
        a, b = lora.factors()
        a = jax.reshard(a, self.rules.gathered(*lora.a_axes))
        b = jax.reshard(b, self.rules.gathered(*lora.b_axes))
        return a * jnp.asarray(lora.scale, a.dtype), b[:, part]

    def _own(self, low: Float[Array, "B T N R"]) -> Float[Array, "B T N R"]:
        """The part of each token's own adapter, if several are stacked."""
        lora = self.kv_b.lora
        assert lora is not None
        if not lora.n_stacked:
            return low
        assert lora.ids is not None, "choose_adapters sets the adapter of every token"
        shape, out = low.shape[:-1], self._spec("heads")
        ids = jax.lax.broadcast_in_dim(lora.ids, shape, (0, 1), out_sharding=out)
        return own_part(low, ids, lora.n_stacked)

    def _scaled(self, x: Float[Array, "B T N H"], part: slice) -> Float[Array, "B T N H"]:
        """Outputs of kv_b_proj, or their gradients, times the gains of an adapter's magnitudes."""
        lora = self.kv_b.lora
        if lora is None or (lora.m is None and lora.gains is None):
            return x
        if lora.m is not None:
            gains = self.kv_b.gain(self.rules)
        else:
            gains = lora.token_gains(self._spec("heads", None), self.rules)
        return (x.astype(jnp.float32) * gains[..., part]).astype(x.dtype)
