"""Mixture of experts: a router sends every token to k of E small MLPs. No token is dropped."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx, struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxrl import types
from jaxrl.kernels.bits import materialize, row_sum
from jaxrl.models.config import DecoderConfig, MoEConfig
from jaxrl.models.layers.experts import ExpertMatrix, sharded_experts
from jaxrl.models.layers.linear import Adapter
from jaxrl.models.layers.stored import QUANTIZED, Axes, MakeParam, make_stored, stored_specs
from sharding import Rules

Live = Bool[Array, "B T"] | Int[Array, "B T"]

# Tensor names in a layer of a Hugging Face file: the router, then an expert's gate, up and down.
QWEN = ("mlp.gate", "mlp.experts.{expert}.%s", ("gate_proj", "up_proj", "down_proj"))
HF_NAMES = {
    "qwen2_moe": QWEN,
    "qwen3_moe": QWEN,
    "qwen3_next": QWEN,
    "qwen3_5_moe": QWEN,
    "mixtral": (
        "block_sparse_moe.gate",
        "block_sparse_moe.experts.{expert}.%s",
        ("w1", "w3", "w2"),
    ),
}
WITHOUT_ADAPTERS = ("qwen3_5_moe",)  # PEFT reads no adapters of the experts of these models

AXES: dict[str, Axes] = {
    "gate": ("experts", "ffw", "w_embed"),
    "up": ("experts", "ffw", "w_embed"),
    "down": ("experts", "w_embed", "ffw"),
}


@struct.dataclass
class RouterLoad:
    """Router statistics of the tokens that are not padding; additive over tokens.

    With a leading layer axis, also over layers.
    """

    prob: types.Array  # float32 [E], sum of each expert's probability
    count: types.Array  # float32 [E], tokens routed to each expert
    n_tokens: types.Array  # float32 []


class MoE(nnx.Module):
    """Σ over the k chosen experts e of p_e down_e(act(gate_e(x)) * up_e(x)).

    p = softmax(x Wrᵀ) over all experts, of which the k largest are kept. With `norm_topk` they are
    divided by their sum, which equals the softmax over the k largest logits.
    """

    def __init__(self, make: MakeParam, cfg: DecoderConfig, ffn: MoEConfig):
        router, expert, names = HF_NAMES[ffn.names]
        E, F, D, lora = ffn.E, ffn.F, cfg.D, cfg.lora
        hf, out_in = dict(zip(AXES, names, strict=True)), dict(gate=(F, D), up=(F, D), down=(D, F))
        self.top_k, self.norm_topk, self.act = ffn.top_k, ffn.norm_topk, ffn.act
        self.implementation = cfg.grouped_matmul
        self.chunk = 0  # tokens of a device at one time, 0 = all; packed.with_mlp_chunk sets it
        self.router = nnx.data(make(f"{router}.weight", (E, D), (None, "w_embed"), hf_shape=(E, D)))

        def weight(name: str) -> Any:
            part, sizes, dtype = expert % hf[name], out_in[name], cfg.base_dtype
            shape = (E, *sizes)
            return make_stored(make, part, shape, AXES[name], n_in=1, hf_shape=sizes, dtype=dtype)

        def make_experts(name: str, shape: tuple[int, ...], axes: Axes, **rest) -> Any:
            return make(name, (E, *shape), ("experts", *axes), **rest)

        def adapter(name: str) -> Adapter | None:
            if lora is None or hf[name] not in lora.targets:
                return None
            if lora.dora and not lora.n_stacked:
                raise ValueError(
                    f"adapters of experts ({hf[name]}) have no magnitudes (DoRA); leave experts "
                    "out of config.lora.target_modules, or set config.lora.dora=False"
                )
            if ffn.names in WITHOUT_ADAPTERS:
                raise ValueError(
                    f"adapters of experts ({hf[name]}): PEFT reads none of {ffn.names} models; "
                    "leave experts out of config.lora.target_modules. The shared expert's are "
                    f"'shared_expert.{hf[name]}' and so on"
                )
            part, sizes, axes = expert % hf[name], out_in[name], AXES[name][1:]
            plain = dataclasses.replace(lora, dora=False)  # of a stack, the DoRA ones are elsewhere
            return Adapter(make_experts, part, plain, sizes, axes, n_out=1, hf_shape=sizes)

        self.gate, self.up, self.down = (nnx.data(weight(name)) for name in AXES)
        self.lora: dict[str, Adapter | None] = nnx.data({name: adapter(name) for name in AXES})
        # The matrices of all layers, with the index of this one; `with_stack` sets it.
        self.stack: dict[str, ExpertMatrix] | None = nnx.data(None)

    def __call__(
        self, x: Float[Array, "B T D"], live: Live, rules: Rules
    ) -> tuple[Float[Array, "B T D"], RouterLoad]:
        """(y, load). Tokens that are not `live` (padding) reach no expert and give zeros.

        A number instead of true is how often the token counts in the load.
        """
        rows = rules.spec("batch", "time", None)
        x = jax.reshard(x, rows)
        w = jax.reshard(self.router, rules.gathered(None, "w_embed"))
        logits = jnp.einsum(
            "BTD,ED->BTE", x, w, out_sharding=rows, preferred_element_type=jnp.float32
        )
        choose = functools.partial(route, top_k=self.top_k, norm_topk=self.norm_topk)
        probs, weights, experts = jax.shard_map(choose, in_specs=rows, out_specs=rows)(logits)
        y = self._apply(x, weights, experts, live, rules)
        y = jax.reshard(y, rules.residual_spec(y.shape))
        return y, router_load(probs, experts, live)

    def _apply(self, x, weights, experts, live, rules: Rules) -> Float[Array, "B T D"]:
        rows, tokens = rules.spec("batch", "time", None), rules.spec("batch", "time")
        # Quantized weights have no gradient to scatter: they are gathered before the shard_map.
        fsdp_axes = () if isinstance(self._matrix("gate").w, QUANTIZED) else _fsdp_token_axes(rules)
        layout = rules.spec if fsdp_axes else rules.gathered
        specs = {name: self._matrix_specs(name, layout) for name in self.lora}
        matrices = {
            name: jax.tree.map(jax.reshard, self._matrix(name), spec)
            for name, spec in specs.items()
        }
        ids = next((lora.ids for lora in self.lora.values() if lora is not None), None)
        body = functools.partial(
            sharded_experts,
            specs=specs,
            act=self.act,
            rules=rules,
            fsdp_axes=fsdp_axes,
            implementation=self.implementation,
            chunk=self.chunk,
        )
        in_specs = (rows, rows, rows, tokens, tokens, specs)
        mapped = jax.shard_map(body, in_specs=in_specs, out_specs=rows)
        live, ids = jax.tree.map(lambda a: jax.reshard(a, tokens), (live, ids))
        return mapped(x, weights, experts, live, ids, matrices)

    def take_stack(self) -> tuple["MoE", dict[str, ExpertMatrix]]:
        """(the module without the matrices of its experts, these matrices), of stacked layers."""
        rest, nothing = jax.tree.map(lambda leaf: leaf, self), nnx.data(None)
        for name in AXES:
            setattr(rest, name, nothing)
            if (lora := rest.lora[name]) is not None:
                lora.a, lora.b, lora.a0, lora.b0 = (nothing,) * 4
        return rest, {name: self._matrix(name) for name in AXES}

    def with_stack(self, stack: dict[str, ExpertMatrix], layer: Int[Array, ""]) -> "MoE":
        """The module of this layer, of those whose matrices `take_stack` took."""
        new = jax.tree.map(lambda leaf: leaf, self)
        matrices = {name: dataclasses.replace(one, layer=layer) for name, one in stack.items()}
        new.stack = nnx.data(matrices)
        return new

    def _matrix(self, name: str) -> ExpertMatrix:
        if self.stack is not None:
            return self.stack[name]
        w, lora = getattr(self, name), self.lora[name]
        if lora is None:
            return ExpertMatrix(w)
        parts = lora.a, lora.b, lora.a0, lora.b0
        return ExpertMatrix(w, *parts, scale=lora.scale, n_stacked=lora.n_stacked)

    def _matrix_specs(self, name: str, layout: Callable[..., jax.P]) -> ExpertMatrix:
        """PartitionSpecs of `_matrix`."""
        matrix, lora = self._matrix(name), self.lora[name]
        stacked = matrix.layer is not None
        spec = functools.partial(layout, "layers") if stacked else layout
        w = stored_specs(matrix.w, spec, AXES[name], 1)
        specs = dataclasses.replace(matrix, w=w, layer=jax.P() if stacked else None)
        if lora is None:
            return specs
        a, b = spec("experts", *lora.a_axes), spec("experts", *lora.b_axes)
        start = {} if matrix.a0 is None else dict(a0=a, b0=b)
        return dataclasses.replace(specs, a=a, b=b, **start)


def route(
    logits: Float[Array, "B T E"], *, top_k: int, norm_topk: bool
) -> tuple[Float[Array, "B T E"], Float[Array, "B T k"], Int[Array, "B T k"]]:
    """(probabilities of all experts, weights and indices of the top k, most probable first)."""
    logits = materialize(logits)
    # XLA on CPU computes the exponential of a difference in another way than that of an array.
    powers = jnp.exp(materialize(logits - jnp.max(logits, axis=-1, keepdims=True)))
    probs = powers / row_sum(powers)[..., None]
    weights, experts = lax.top_k(probs, top_k)
    if norm_topk:
        # Sequential sum: a reduction's order could differ between engine and trainer.
        total = functools.reduce(jnp.add, [weights[..., i] for i in range(top_k)])
        weights = weights / total[..., None]
    return probs, weights, experts


def router_load(
    probs: Float[Array, "B T E"], experts: Int[Array, "B T k"], live: Live
) -> RouterLoad:
    """Router statistics of one layer, summed over the live tokens, each as often as it counts."""
    E, kept = probs.shape[-1], live.astype(jnp.float32)
    chosen = jnp.sum(experts[..., None] == jnp.arange(E), axis=-2)
    return RouterLoad(
        prob=jnp.sum(probs * kept[..., None], axis=(0, 1)),
        count=jnp.sum(chosen * kept[..., None], axis=(0, 1)),
        n_tokens=jnp.sum(kept),
    )


def _fsdp_token_axes(rules: Rules) -> tuple[str, ...]:
    """Axes that shard the weights' model dimension, if their devices have different tokens."""
    axes = rules.mesh_axes("w_embed")
    return axes if set(axes) <= set(rules.mesh_axes("batch") + rules.mesh_axes("time")) else ()


def keeps_stack(rules: Rules) -> bool:
    """Whether a layer uses its experts' matrices as they are sharded, so none is gathered."""
    return rules.layers is None and rules.n_shards("w_embed") == 1
