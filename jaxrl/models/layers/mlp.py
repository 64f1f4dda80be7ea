"""Feed-forward network of a dense layer, and the shared expert of a mixture of experts."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxrl.models.config import DecoderConfig, MLPConfig, MoEConfig
from jaxrl.models.layers.chunks import (
    apply_to_chunks,
    join_positions,
    n_chunks,
    n_position_shards,
    split_positions,
)
from jaxrl.models.layers.linear import Linear, MakeParam, apply_linears
from sharding import Rules

SHARED_GATE = "mlp.shared_expert_gate"
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

    def __init__(self, make: MakeParam, cfg: DecoderConfig, ffn: MLPConfig, name: str = "mlp"):
        options: Any = dict(bias=ffn.bias, lora=cfg.lora, base_dtype=cfg.base_dtype)

        def up(name: str) -> Linear:
            axes = ("ffw", "w_embed")
            return Linear(make, name, "BTD,FD->BTF", (ffn.F, cfg.D), axes, **options)

        self.act = ffn.act
        self.chunk = 0  # tokens of a device at one time, 0 = all; packed.with_mlp_chunk sets it
        self.gate, self.up = up(f"{name}.gate_proj"), up(f"{name}.up_proj")
        shape, axes = (cfg.D, ffn.F), ("w_embed", "ffw")
        self.down = Linear(make, f"{name}.down_proj", "BTF,DF->BTD", shape, axes, **options)

    def __call__(self, x: Float[Array, "B T D"], rules: Rules) -> Float[Array, "B T D"]:
        n_tokens = x.shape[0] * x.shape[1] // (rules.n_shards("batch") * rules.n_shards("time"))
        n = n_chunks(n_tokens, self.chunk, x.shape[1] // n_position_shards(x))
        if n == 1:
            return self.apply(x, rules)
        layout = jax.typeof(x).sharding.spec
        whole = self._gather(rules)

        def apply(mlp: MLP, x: Float[Array, "B t D"]) -> Float[Array, "B t D"]:
            return jax.reshard(mlp.apply(x, rules), layout)

        return join_positions(apply_to_chunks(apply, whole, split_positions(x, n)), x)

    def apply(self, x: Float[Array, "B T D"], rules: Rules) -> Float[Array, "B T D"]:
        """The network on all tokens at one time."""
        projected = apply_linears(x, self.gate, self.up, rules=rules)
        gate, up = share_backward(*checkpoint_name(projected, "gate_up"))
        return checkpoint_name(self.down(ACTIVATIONS[self.act](gate) * up, rules), "down")

    def _gather(self, rules: Rules) -> "MLP":
        new = jax.tree.map(lambda leaf: leaf, self)
        new.gate, new.up = self.gate.gather(rules), self.up.gather(rules)
        new.down = self.down.gather(rules)
        return new


class SharedExpert(nnx.Module):
    """sigmoid(g x) mlp(x): an MLP that every token uses, next to its own experts.

    Without a gate g, as in DeepSeek-V3, it is mlp(x), and has a plural name in files.
    """

    def __init__(self, make: MakeParam, cfg: DecoderConfig, ffn: MoEConfig):
        name = "mlp.shared_expert" if ffn.shared_gate else "mlp.shared_experts"
        self.mlp = MLP(make, cfg, MLPConfig(ffn.shared_F, ffn.act), name)
        options: Any = dict(lora=cfg.lora, base_dtype=cfg.base_dtype)
        shape, axes = (1, cfg.D), (None, "w_embed")
        gate = functools.partial(Linear, make, SHARED_GATE, "BTD,SD->BTS", shape, axes, **options)
        self.gate = gate() if ffn.shared_gate else None

    def __call__(self, x: Float[Array, "B T D"], rules: Rules) -> Float[Array, "B T D"]:
        y = self.mlp(x, rules)
        if self.gate is None:
            return y
        gate = self.gate(x, rules)
        gate = jax.nn.sigmoid(jax.reshard(gate, jax.typeof(y).sharding.spec).astype(jnp.float32))
        return (gate * y).astype(y.dtype)
