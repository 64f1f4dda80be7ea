"""Inputs of each layer by token, next to the residual stream ("per-layer embeddings" of Gemma 4).

With e the embedding of a token, t its row of a second table, and l a layer:

    i_l = (norm(W e / √D)_l + √P t_l) / √2
    x <- x + norm(Wp (act(Wg x) * i_l))

W gives the inputs of all layers at one time; norms are RMSNorms. Source: Gemma4TextModel in
transformers.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxrl.kernels.bits import materialize
from jaxrl.kernels.matmul import matmul
from jaxrl.models.config import ClampedGLU, DecoderConfig
from jaxrl.models.layers.linear import Linear, MakeParam
from jaxrl.models.layers.mlp import ACTIVATIONS
from jaxrl.models.layers.norms import RMSNorm, make_norm, rms_options
from sharding import Rules, gather_matrix, gather_rows

TABLE = "model.embed_tokens_per_layer.weight"


class LayerInputs(nnx.Module):
    """The inputs of all layers, [L, B, T, P]."""

    def __init__(self, make: MakeParam, cfg: DecoderConfig):
        features = cfg.L * cfg.input_P
        self.shape = cfg.L, cfg.input_P
        table, axes = (cfg.input_V, features), ("vocab", "w_embed")
        self.table = nnx.data(make(TABLE, table, axes, hf_shape=table))
        w, axes = (features, cfg.D), (None, "w_embed")
        name = "model.per_layer_model_projection.weight"
        self.w = nnx.data(make(name, w, axes, hf_shape=w))
        norm = "model.per_layer_projection_norm"
        self.norm = RMSNorm(make, norm, cfg.input_P, **rms_options(cfg))

    def __call__(
        self, tokens: Int[Array, "B T"], x: Float[Array, "B T D"], rules: Rules
    ) -> Float[Array, "L B T P"]:
        L, P = self.shape
        rows = rules.spec("batch", "time", None)
        w = gather_matrix(self.w, rules, (None, "w_embed"), 1)
        projected = materialize(
            matmul(x, w, out_sharding=rows) * jnp.asarray(x.shape[-1] ** -0.5, x.dtype)
        )
        found = gather_rows(self.table, tokens, rules, ("vocab", "w_embed"))
        found = materialize(found * jnp.asarray(P**0.5, x.dtype))
        out = rules.spec("batch", "time", None, None)
        projected, found = (
            jnp.reshape(a, (*tokens.shape, L, P), out_sharding=out) for a in (projected, found)
        )
        inputs = materialize((self.norm(projected) + found) * jnp.asarray(2**-0.5, x.dtype))
        return jnp.moveaxis(inputs, 2, 0)


class LayerInput(nnx.Module):
    """norm(Wp (act(Wg x) * i)), of one layer and its inputs i."""

    def __init__(self, make: MakeParam, cfg: DecoderConfig, act: str | ClampedGLU):
        P, D, options = cfg.input_P, cfg.D, dict[str, Any](lora=cfg.lora, base_dtype=cfg.base_dtype)
        into, out = (None, "w_embed"), ("w_embed", None)
        assert isinstance(act, str)
        self.act = act
        self.gate = Linear(make, "per_layer_input_gate", "BTD,PD->BTP", (P, D), into, **options)
        self.up = Linear(make, "per_layer_projection", "BTP,DP->BTD", (D, P), out, **options)
        self.norm = make_norm(make, "post_per_layer_input_norm", cfg)

    def __call__(
        self, x: Float[Array, "B T D"], inputs: Float[Array, "B T P"], rules: Rules
    ) -> Float[Array, "B T D"]:
        h = ACTIVATIONS[self.act](self.gate(x, rules))
        return self.norm(self.up(h * jax.reshard(inputs, jax.typeof(h).sharding.spec), rules))
