"""Feed-forward network of a dense layer."""

import jax
from flax import nnx
from jaxtyping import Array, Float

from jaxrl.models.config import DecoderConfig
from jaxrl.models.layers.linear import Linear, MakeParam, apply_linears
from sharding import Rules

ACTIVATIONS = {"silu": jax.nn.silu, "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True)}


class MLP(nnx.Module):
    """act(x Wgᵀ) * (x Wuᵀ) Wdᵀ (https://arxiv.org/abs/2002.05202)."""

    def __init__(self, make: MakeParam, cfg: DecoderConfig):
        def up(name: str) -> Linear:
            shape, axes = (cfg.F, cfg.D), ("ffw", "w_embed")
            return Linear(
                make,
                name,
                "BTD,FD->BTF",
                shape,
                axes,
                hf_shape=shape,
                bias=cfg.mlp_bias,
                lora=cfg.lora,
            )

        self.act = cfg.act
        self.gate, self.up = up("mlp.gate_proj"), up("mlp.up_proj")
        shape, axes = (cfg.D, cfg.F), ("w_embed", "ffw")
        self.down = Linear(
            make,
            "mlp.down_proj",
            "BTF,DF->BTD",
            shape,
            axes,
            hf_shape=shape,
            bias=cfg.mlp_bias,
            lora=cfg.lora,
        )

    def __call__(self, x: Float[Array, "B T D"], rules: Rules) -> Float[Array, "B T D"]:
        gate, up = apply_linears(x, self.gate, self.up, rules=rules)
        return self.down(ACTIVATIONS[self.act](gate) * up, rules)
