"""One residual block of the decoder."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl.kernels.bits import materialize
from jaxrl.models.config import DecoderConfig, LayerConfig, MoEConfig
from jaxrl.models.layers.layer_inputs import LayerInput
from jaxrl.models.layers.linear import MakeParam
from jaxrl.models.layers.mixers import MIXERS
from jaxrl.models.layers.mlp import MLP, SharedExpert
from jaxrl.models.layers.moe import MoE
from jaxrl.models.layers.norms import LayerNorm, RMSNorm, make_norm
from jaxrl.models.layers.row_ops import LayerPlace, RowOps
from sharding import Rules


class Layer(nnx.Module):
    """One residual block, with the norms that its config names."""

    def __init__(self, make: MakeParam, cfg: DecoderConfig, layer: LayerConfig):
        def norm(name: str | None, eps: float | None = None) -> RMSNorm | LayerNorm | None:
            return None if name is None else make_norm(make, name, cfg, eps=eps)

        mixer, ffn = layer.mixer, layer.ffn
        self.attn = MIXERS[type(mixer)](make, cfg, mixer)
        is_mixture = isinstance(ffn, MoEConfig)
        self.mlp = MoE(make, cfg, ffn) if is_mixture else MLP(make, cfg, ffn)
        self.shared = SharedExpert(make, cfg, ffn) if is_mixture and ffn.shared_F else None
        self.parallel, self.residual_scale = layer.parallel, cfg.residual_scale
        before, after, before_mlp, after_mlp = layer.norms
        self.attn_norm, self.post_attn_norm = norm(before), norm(after, cfg.post_norm_eps)
        self.mlp_norm, self.post_mlp_norm = norm(before_mlp), norm(after_mlp, cfg.post_norm_eps)
        branches = ffn.norms if is_mixture else (None, None, None)
        self.expert_norm, self.post_expert_norm, self.post_shared_norm = map(norm, branches)
        self.input_gate = LayerInput(make, cfg, layer.ffn.act) if cfg.input_P else None
        scalar = make("layer_scalar", (1,), (None,), init="ones") if layer.scalar else None
        self.scalar = nnx.data(scalar)

    def __call__(
        self, x, live, positions, place: LayerPlace, window, rows: RowOps, state, rules: Rules
    ):
        """(x, state, router load or None)."""
        inputs, load = x if self.attn_norm is None else self.attn_norm(x), None
        h, state = self.attn(inputs, positions, place, window, rows, state, rules)
        x = self._add(x, h, self.post_attn_norm)
        if not self.parallel:
            inputs = x if self.mlp_norm is None else self.mlp_norm(x)
        if isinstance(self.mlp, MoE):
            own = inputs if self.expert_norm is None else self.expert_norm(x)
            h, load = self.mlp(own, live, rules, place.experts, residual=x)
            h = h if self.post_expert_norm is None else self.post_expert_norm(h)
        else:
            h = self.mlp(inputs, rules)
        if self.shared is not None:
            shared = self.shared(inputs, rules)
            norm = self.post_shared_norm
            h = h + (shared if norm is None else norm(shared))
        x = self._add(x, h, self.post_mlp_norm)
        if self.input_gate is not None and place.inputs is not None:
            x = x + self.input_gate(x, place.inputs, rules)
        if self.scalar is not None:  # not in one instruction with the next sum
            x = materialize(x * self.scalar.astype(x.dtype))
        if place.deep is not None:
            x = x + jax.reshard(place.deep, jax.typeof(x).sharding.spec)
        return x, state, load

    def _add(self, x: jax.Array, h: jax.Array, norm: RMSNorm | LayerNorm | None) -> jax.Array:
        """The residual stream with the output of the mixer or of the MLP."""
        h = h if norm is None else norm(h)
        return x + (
            h if self.residual_scale == 1 else h * jnp.asarray(self.residual_scale, h.dtype)
        )
