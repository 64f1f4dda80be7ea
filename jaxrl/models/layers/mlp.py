"""Feed-forward network of a dense layer."""

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxrl.models.config import DecoderConfig
from jaxrl.models.layers.linear import Linear, MakeParam, apply_linears
from sharding import Rules

ACTIVATIONS = {"silu": jax.nn.silu, "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True)}


@jax.custom_vjp
def share_backward(gate: jax.Array, up: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Identity; in training, gate and up exist before their use, and so do their gradients.

    The backward pass then reads them once, in one kernel for both gradients and the product. XLA
    otherwise computes each of the three in the kernel that uses it.
    """
    return gate, up


def _share_forward(gate, up):
    return jax.lax.optimization_barrier((gate, up)), None


share_backward.defvjp(_share_forward, lambda _, grads: jax.lax.optimization_barrier(grads))


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
                base_dtype=cfg.base_dtype,
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
            base_dtype=cfg.base_dtype,
        )

    def __call__(self, x: Float[Array, "B T D"], rules: Rules) -> Float[Array, "B T D"]:
        projected = apply_linears(x, self.gate, self.up, rules=rules)
        gate, up = share_backward(*checkpoint_name(projected, "gate_up"))
        return checkpoint_name(self.down(ACTIVATIONS[self.act](gate) * up, rules), "down")
