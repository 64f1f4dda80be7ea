"""Mixture of experts: a router sends every token to k of E small MLPs. No token is dropped."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxrl.kernels.bits import materialize
from jaxrl.models.config import DecoderConfig, MoEConfig, target_name
from jaxrl.models.layers.experts import ExpertMatrix, sharded_experts
from jaxrl.models.layers.linear import Adapter
from jaxrl.models.layers.router import (
    CORRECTION,
    Live,
    RouterLoad,
    replay_load,
    route,
    router_load,
    scaled_input,
)
from jaxrl.models.layers.stored import QUANTIZED, Axes, MakeParam, make_stored, stored_specs
from sharding import Rules

# Tensor names in a layer of a Hugging Face file: the router, then an expert's gate, up and down.
QWEN = ("mlp.gate", "mlp.experts.{expert}.%s", ("gate_proj", "up_proj", "down_proj"))
HF_NAMES = {
    "qwen2_moe": QWEN,
    "qwen3_moe": QWEN,
    "qwen3_next": QWEN,
    "qwen3_5_moe": QWEN,
    "glm4_moe": QWEN,
    "gpt_oss": ("mlp.router", *QWEN[1:]),  # in files all experts are in one (fused_experts.py)
    "glm4_moe_lite": QWEN,
    "deepseek_v3": QWEN,
    "gemma4": ("router.proj", "experts.{expert}.%s", ("gate_proj", "up_proj", "down_proj")),
    "mixtral": (
        "block_sparse_moe.gate",
        "block_sparse_moe.experts.{expert}.%s",
        ("w1", "w3", "w2"),
    ),
}
ROUTER_INPUT, ROUTER_EXPERTS = "router.scale", "router.per_expert_scale"
# PEFT reads no adapters of the experts of these models.
WITHOUT_ADAPTERS = ("qwen3_5_moe", "gpt_oss", "gemma4")

BIAS_AXES: dict[str, Axes] = {
    "gate": ("experts", "ffw"),
    "up": ("experts", "ffw"),
    "down": ("experts", None),
}
AXES: dict[str, Axes] = {
    "gate": ("experts", "ffw", "w_embed"),
    "up": ("experts", "ffw", "w_embed"),
    "down": ("experts", "w_embed", "ffw"),
}


class MoE(nnx.Module):
    """Σ over the k chosen experts e of w_e down_e(act(gate_e(x)) * up_e(x)).

    The router (router.py) chooses the experts and their weights w_e by the logits x Wrᵀ. With
    biases, these logits have one, and so have the three products of an expert.
    """

    def __init__(self, make: MakeParam, cfg: DecoderConfig, ffn: MoEConfig):
        router, expert, names = HF_NAMES[ffn.names]
        E, F, D, lora = ffn.E, ffn.F, cfg.D, cfg.lora
        hf, out_in = dict(zip(AXES, names, strict=True)), dict(gate=(F, D), up=(F, D), down=(D, F))
        self.cfg, self.act = ffn.router, ffn.act
        self.implementation = cfg.grouped_matmul
        self.chunk = 0  # tokens of a device at one time, 0 = all; packed.with_mlp_chunk sets it
        self.records = False  # the load has the experts; router_replay.recording sets it
        self.router = nnx.data(make(f"{router}.weight", (E, D), (None, "w_embed"), hf_shape=(E, D)))
        zeros = functools.partial(make, init="zeros")
        bias = zeros(f"{router}.bias", (E,), (None,)) if ffn.bias else None
        self.router_bias = nnx.data(bias)
        correction = functools.partial(zeros, hf_shape=(E,), dtype="float32")
        self.correction = nnx.data(
            correction(f"{router}.{CORRECTION}", (E,), (None,)) if ffn.router.correction else None
        )

        learned = functools.partial(make, init="ones")
        scaled, self.eps = ffn.router.learned_scales, cfg.norm_eps
        self.input_scale = nnx.data(learned(ROUTER_INPUT, (D,), (None,)) if scaled else None)
        self.expert_scale = nnx.data(learned(ROUTER_EXPERTS, (E,), (None,)) if scaled else None)

        def weight(name: str) -> Any:
            part, sizes, dtype = expert % hf[name], out_in[name], cfg.base_dtype
            shape = (E, *sizes)
            return make_stored(make, part, shape, AXES[name], n_in=1, hf_shape=sizes, dtype=dtype)

        def make_experts(name: str, shape: tuple[int, ...], axes: Axes, **rest) -> Any:
            return make(name, (E, *shape), ("experts", *axes), **rest)

        def adapter(name: str) -> Adapter | None:
            part = expert % hf[name]
            if lora is None or target_name(part.replace(".{expert}", "")) not in lora.targets:
                return None
            if lora.dora and not lora.n_stacked:
                raise ValueError(
                    f"adapters of experts ({hf[name]}) have no magnitudes (DoRA); leave experts "
                    "out of config.lora.target_modules, or set config.lora.dora=False"
                )
            if ffn.names in WITHOUT_ADAPTERS:
                raise ValueError(
                    f"adapters of experts ({hf[name]}): PEFT reads none of {ffn.names} models; "
                    "leave experts out of config.lora.target_modules"
                    + f". The shared expert's are 'shared_expert.{hf[name]}' and so on"
                    * bool(ffn.shared_F)
                )
            sizes, axes = out_in[name], AXES[name][1:]
            plain = dataclasses.replace(lora, dora=False)  # of a stack, the DoRA ones are elsewhere
            return Adapter(make_experts, part, plain, sizes, axes, n_out=1, hf_shape=sizes)

        def expert_bias(name: str) -> Any:
            size = out_in[name][:1]
            part = f"{expert % hf[name]}.bias"
            return zeros(part, (E, *size), BIAS_AXES[name], hf_shape=size) if ffn.bias else None

        self.gate, self.up, self.down = (nnx.data(weight(name)) for name in AXES)
        self.bias: dict[str, Any] = nnx.data({name: expert_bias(name) for name in AXES})
        self.lora: dict[str, Adapter | None] = nnx.data({name: adapter(name) for name in AXES})
        # The matrices of all layers, with the index of this one; `with_stack` sets it.
        self.stack: dict[str, ExpertMatrix] | None = nnx.data(None)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        live: Live,
        rules: Rules,
        given: Int[Array, "B T k"] | None = None,
        *,
        residual: Float[Array, "B T D"] | None = None,
    ) -> tuple[Float[Array, "B T D"], RouterLoad]:
        """(y, load). Tokens that are not `live` (padding) reach no expert and give zeros.

        A number instead of true is how often the token counts in the load. `given` are experts to
        replay (`route`). A router with learned scales reads the `residual` stream.
        """
        rows = rules.spec("batch", "time", None)
        x = jax.reshard(x, rows)
        w = jax.reshard(self.router, rules.gathered(None, "w_embed"))
        routed = x
        if self.input_scale is not None:
            assert residual is not None
            routed = scaled_input(jax.reshard(residual, rows), self.input_scale, self.eps)
        logits = jnp.einsum(
            "BTD,ED->BTE", routed, w, out_sharding=rows, preferred_element_type=jnp.float32
        )
        if self.router_bias is not None:
            logits = materialize(logits) + jax.reshard(self.router_bias, rules.gathered(None))
        correction = self.correction
        if correction is not None:
            correction = jax.reshard(correction, rules.gathered(None))
        choose = functools.partial(route, router=self.cfg)
        given = None if given is None else jax.reshard(given, rows)
        replayed = None if given is None else rows
        in_specs = rows, None if correction is None else jax.P(), replayed
        out_specs = rows, rows, rows, replayed
        mapped = jax.shard_map(choose, in_specs=in_specs, out_specs=out_specs)
        probs, weights, experts, changed = mapped(logits, correction, given)
        if self.expert_scale is not None:
            scale = self.expert_scale.astype(jnp.float32)
            weights = weights * scale.at[experts].get(out_sharding=rows)
        y = self._apply(x, weights, experts, live, rules)
        y = jax.reshard(y, rules.residual_spec(y.shape))
        load = router_load(probs, experts, live)
        if given is not None and changed is not None:
            load = replay_load(load, given, changed, live)
        return y, dataclasses.replace(load, experts=experts) if self.records else load

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
            rest.bias[name] = None
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
        w, lora, bias = getattr(self, name), self.lora[name], self.bias[name]
        if lora is None:
            return ExpertMatrix(w, bias=bias)
        parts = lora.a, lora.b, lora.a0, lora.b0
        return ExpertMatrix(w, *parts, bias=bias, scale=lora.scale, n_stacked=lora.n_stacked)

    def _matrix_specs(self, name: str, layout: Callable[..., jax.P]) -> ExpertMatrix:
        """PartitionSpecs of `_matrix`."""
        matrix, lora = self._matrix(name), self.lora[name]
        stacked = matrix.layer is not None
        spec = functools.partial(layout, "layers") if stacked else layout
        w = stored_specs(matrix.w, spec, AXES[name], 1)
        bias = None if matrix.bias is None else spec(*BIAS_AXES[name])
        specs = dataclasses.replace(matrix, w=w, bias=bias, layer=jax.P() if stacked else None)
        if lora is None:
            return specs
        a, b = spec("experts", *lora.a_axes), spec("experts", *lora.b_axes)
        start = {} if matrix.a0 is None else dict(a0=a, b0=b)
        return dataclasses.replace(specs, a=a, b=b, **start)


def _fsdp_token_axes(rules: Rules) -> tuple[str, ...]:
    """Axes that shard the weights' model dimension, if their devices have different tokens."""
    axes = rules.mesh_axes("w_embed")
    return axes if set(axes) <= set(rules.mesh_axes("batch") + rules.mesh_axes("time")) else ()


def keeps_stack(rules: Rules) -> bool:
    """Whether a layer uses its experts' matrices as they are sharded, so none is gathered."""
    return rules.layers is None and rules.n_shards("w_embed") == 1
