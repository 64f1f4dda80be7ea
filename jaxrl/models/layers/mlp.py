"""Feed-forward network of a dense layer, and the shared expert of a mixture of experts."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxrl.models.config import (
    MLP_NAMES,
    ClampedGLU,
    DecoderConfig,
    LinearOptions,
    MLPConfig,
    MoEConfig,
)
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
ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "relu": jax.nn.relu,
}


def gated(act: str | ClampedGLU, gate: jax.Array, up: jax.Array) -> jax.Array:
    """act(gate) * up, or the clamped form of both."""
    if not isinstance(act, ClampedGLU):
        return ACTIVATIONS[act](gate) * up
    gate, up = jnp.minimum(gate, act.limit), jnp.clip(up, -act.limit, act.limit)
    return gate * jax.nn.sigmoid(act.alpha * gate) * (up + 1)


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
    """(act(x Wgᵀ) * (x Wuᵀ)) Wdᵀ (https://arxiv.org/abs/2002.05202).

    Without a gate, it is act(x Wuᵀ) Wdᵀ.

    A fused projection has the rows of gate and up in turns, some of each, so that every shard has
    as many of both.
    """

    def __init__(self, make: MakeParam, cfg: LinearOptions, ffn: MLPConfig):
        options: Any = dict(bias=ffn.bias, lora=cfg.lora, base_dtype=cfg.base_dtype)
        options["clipped"] = ffn.clipped

        def up(name: str) -> Linear:
            axes = ("ffw", "w_embed")
            return Linear(make, name, "BTD,FD->BTF", (ffn.F, cfg.D), axes, **options)

        self.act = ffn.act
        self.chunk = 0  # tokens of a device at one time, 0 = all; packed.with_mlp_chunk sets it
        name, *parts = ffn.names
        gate, plain, down = (f"{name}.{part}" for part in parts)
        fused = f"{name}.gate_up_proj"
        self.gate_up = _fused(make, fused, ffn.F, cfg.D, **options) if ffn.fused else None
        self.gate = up(gate) if ffn.gated and not ffn.fused else None
        self.up = None if ffn.fused else up(plain)
        shape, axes = (cfg.D, ffn.F), ("w_embed", "ffw")
        self.down = Linear(make, down, "BTF,DF->BTD", shape, axes, **options)

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
        inputs = [linear for linear in (self.gate_up, self.gate, self.up) if linear is not None]
        projected = checkpoint_name(apply_linears(x, *inputs, rules=rules), "gate_up")
        if self.gate_up is not None:
            projected = _split_fused(projected[0], rules)
        if len(projected) == 1:
            h = ACTIVATIONS[self.act](projected[0])
        else:
            gate, up = share_backward(*projected)
            h = ACTIVATIONS[self.act](gate) * up
        return checkpoint_name(self.down(h, rules), "down")

    def _gather(self, rules: Rules) -> "MLP":
        new = jax.tree.map(lambda leaf: leaf, self)
        for name in ("gate_up", "gate", "up", "down"):
            linear = getattr(self, name)
            setattr(new, name, None if linear is None else linear.gather(rules))
        return new


def _fused(make: MakeParam, name: str, F: int, D: int, **options: Any) -> Linear:
    """The projection of gate and up: F / C times C rows of the gate and C rows of up.

    C is up to 128, the lanes of vector units, as far as 16 shards can have whole parts.
    """
    C = max(math.gcd(F, 16 * 128) // 16, 1)
    shape, axes = (F // C, 2 * C, D), ("ffw", None, "w_embed")
    return Linear(make, name, "BTD,FCD->BTFC", shape, axes, blocks=(C, C), **options)


def _split_fused(y: Float[Array, "B T F C"], rules: Rules) -> list[Float[Array, "B T f"]]:
    """[gate, up] of the output of `_fused`."""
    shape, out = (*y.shape[:2], y.shape[2] * y.shape[3] // 2), rules.spec("batch", "time", "ffw")
    return [jnp.reshape(part, shape, out_sharding=out) for part in jnp.split(y, 2, axis=-1)]


class SharedExpert(nnx.Module):
    """sigmoid(g x) mlp(x): an MLP that every token uses, next to its own experts.

    Without a gate g, as in DeepSeek-V3, it is mlp(x), and has a plural name in files. If the
    experts are not part of the MLP (Gemma 4), it is the MLP.
    """

    def __init__(self, make: MakeParam, cfg: DecoderConfig, ffn: MoEConfig):
        name = "mlp.shared_expert" if ffn.shared_gate else "mlp.shared_experts"
        assert isinstance(ffn.act, str)
        names = (ffn.shared_name or name, *MLP_NAMES[1:])
        self.mlp = MLP(make, cfg, MLPConfig(ffn.shared_F, ffn.act, names=names))
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
