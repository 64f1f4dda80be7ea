"""Decoder-only transformer: Flax NNX modules, used as plain pytrees.

B rows, T tokens, D model, N heads, K kv heads, H head dim, F feed-forward, V vocabulary, L layers.
Training and rollout call the same `Decoder`; they differ only in the `attend` function they pass.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxrl.config.remat import parse_remat
from jaxrl.kernels.matmul import matmul
from jaxrl.models.config import DecoderConfig
from jaxrl.models.kv_cache import KVCache
from jaxrl.models.layers.experts import ExpertMatrix
from jaxrl.models.layers.linear import Linear, MakeParam, apply_linears, make_spec
from jaxrl.models.layers.mlp import MLP
from jaxrl.models.layers.moe import Live, MoE, RouterLoad, keeps_stack
from jaxrl.models.layers.norms import RMSNorm
from jaxrl.models.layers.rope import Rotation, rotate, rotations
from jaxrl.models.layers.tables import table_adapters
from jaxrl.models.remat import layer_input, loop_remat, recompute, scan_remat
from jaxrl.models.spec import init_params, is_spec
from sharding import Rules, gather_matrix, target_platform

# (q [B,T,N,H], k [B,T,K,H], v [B,T,K,H], window, layer_index, state) -> (out [B,T,N,H], state)
Attend = Callable[..., tuple[jax.Array, Any]]


def prevent_norm_fusion(projected: jax.Array) -> jax.Array:
    """Identity, with an optimization barrier on TPU, in the backward pass as well.

    libtpu 0.0.51 aborts if it fuses a head's norm with the projection ("split of a padded window
    dim").
    """
    return jax.lax.optimization_barrier(projected) if target_platform() == "tpu" else projected


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions; the caller passes the attention kernel."""

    def __init__(self, make: MakeParam, cfg: DecoderConfig):
        options: Any = dict(lora=cfg.lora, base_dtype=cfg.base_dtype)

        def project(name: str, letter: str, heads: int, axis: str) -> Linear:
            eq = f"BTD,{letter}HD->BT{letter}H"
            shape, axes = (heads, cfg.H, cfg.D), (axis, None, "w_embed")
            return Linear(make, name, eq, shape, axes, bias=cfg.qkv_bias, **options)

        self.q = project("self_attn.q_proj", "N", cfg.N, "heads")
        self.k = project("self_attn.k_proj", "K", cfg.K, "kv_heads")
        self.v = project("self_attn.v_proj", "K", cfg.K, "kv_heads")
        self.o = Linear(
            make,
            "self_attn.o_proj",
            "BTNH,DNH->BTD",
            (cfg.D, cfg.N, cfg.H),
            ("w_embed", "heads", None),
            bias=cfg.o_bias,
            **options,
        )

        def norm(name: str) -> RMSNorm | None:
            if not cfg.qk_norm:
                return None
            return RMSNorm(make, name, cfg.H, eps=cfg.norm_eps, unit_offset=cfg.unit_offset)

        self.q_norm, self.k_norm = norm("self_attn.q_norm"), norm("self_attn.k_norm")

    def __call__(
        self, x, positions, rotation, window, layer_index, attend: Attend, state, rules: Rules
    ):
        projected = apply_linears(x, self.q, self.k, self.v, rules=rules)
        q, k, v = checkpoint_name(projected, "qkv")
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(prevent_norm_fusion(q)), self.k_norm(prevent_norm_fusion(k))
        q, k = rotate(q, positions, rotation), rotate(k, positions, rotation)
        out, state = attend(q, k, v, window, layer_index, state)
        return checkpoint_name(self.o(out, rules), "o"), state


class Layer(nnx.Module):
    """One residual block. Gemma adds a second norm after attention and after the MLP."""

    def __init__(self, make: MakeParam, cfg: DecoderConfig):
        def norm(name: str) -> RMSNorm:
            return RMSNorm(make, name, cfg.D, eps=cfg.norm_eps, unit_offset=cfg.unit_offset)

        self.attn = Attention(make, cfg)
        self.mlp = MoE(make, cfg) if cfg.E else MLP(make, cfg)
        self.attn_norm = norm("input_layernorm")
        self.mlp_norm = norm(
            "pre_feedforward_layernorm" if cfg.post_norms else "post_attention_layernorm"
        )
        self.post_attn_norm = norm("post_attention_layernorm") if cfg.post_norms else None
        self.post_mlp_norm = norm("post_feedforward_layernorm") if cfg.post_norms else None

    def __call__(
        self, x, live, positions, rotation, window, layer_index, attend: Attend, state, rules: Rules
    ):
        """(x, state, router load or None)."""
        h = self.attn_norm(x)
        h, state = self.attn(h, positions, rotation, window, layer_index, attend, state, rules)
        x = x + (h if self.post_attn_norm is None else self.post_attn_norm(h))
        h, load = self.mlp_norm(x), None
        if isinstance(self.mlp, MoE):
            h, load = self.mlp(h, live, rules)
        else:
            h = self.mlp(h, rules)
        return x + (h if self.post_mlp_norm is None else self.post_mlp_norm(h)), state, load


class Decoder(nnx.Module):
    """Embedding, L layers, final norm and the heads of its config.

    Heads are the unembedding ("vocab") and a linear map to one number ("score": a value or a
    reward). `decoder_specs` builds its parameter table.
    """

    def __init__(self, cfg: DecoderConfig):
        top = make_spec("")
        self.cfg = cfg
        self.layers: Any  # one Layer of stacked parameters, or a list

        def table(name: str) -> Any:
            return top(name, (cfg.V, cfg.D), ("vocab", "w_embed"), hf_shape=(cfg.V, cfg.D))

        self.embed = nnx.data(table("model.embed_tokens.weight"))
        if cfg.stacked:
            self.layers = Layer(make_spec("model.layers.{layer}.", cfg.L), cfg)
        else:
            self.layers = nnx.List(
                [Layer(make_spec(f"model.layers.{i}."), cfg) for i in range(cfg.L)]
            )
        self.norm = RMSNorm(top, "model.norm", cfg.D, eps=cfg.norm_eps, unit_offset=cfg.unit_offset)
        untied = "vocab" in cfg.heads and not cfg.tied
        self.lm_head = nnx.data(table("lm_head.weight") if untied else None)
        self.lora = nnx.data(table_adapters(top, cfg))  # of embed and lm_head, by these names
        self.score = nnx.data(
            top("score.weight", (1, cfg.D), (None, "w_embed"), init="zeros")
            if "score" in cfg.heads
            else None
        )

    @property
    def unembed(self) -> jax.Array:
        """[V, D]: the lm_head, or the embedding if tied; ValueError without the "vocab" head."""
        if "vocab" not in self.cfg.heads:
            raise ValueError(
                f"this {self.cfg.family} model has the heads {self.cfg.heads} and so no logits; "
                "load it with heads=('vocab',)"
            )
        return self.embed if self.lm_head is None else self.lm_head

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        attend: Attend,
        state: Any = None,
        *,
        live: Live,
        rules: Rules,
        remat: str = "none",
    ) -> tuple[Float[Array, "B T D"], Any, RouterLoad | None]:
        """(final hidden states, state after the last layer, router load with layers first).

        `state` is passed through `attend`: the KV cache in rollout. `live` is not
        zero at tokens that are not padding; the load of a mixture of experts counts these as often
        as it says, and is None for a dense model.
        """
        x = self.embed_tokens(tokens, rules)
        x = jax.reshard(x, rules.residual_spec(x.shape))
        x, state, load = run_layers(
            self, x, positions, attend, state, live=live, rules=rules, remat=remat
        )
        return jax.reshard(self.norm(x), rules.spec("batch", "time", "embed")), state, load

    def embed_tokens(self, tokens: Int[Array, "B T"], rules: Rules) -> Float[Array, "B T D"]:
        """Input of the first layer."""
        table = gather_matrix(self.embed, rules, ("vocab", "w_embed"), 1)
        x = table.at[tokens].get(out_sharding=rules.spec("batch", "time", "embed"))
        if (adapter := self.lora["embed"]) is not None:
            x = x + adapter.rows(tokens, rules)
        return x * jnp.asarray(self.cfg.embed_scale, x.dtype)

    def logits(self, hidden: Float[Array, "B T D"], rules: Rules) -> Float[Array, "B T V"]:
        """float32 logits, soft-capped if the family does so."""
        w = jax.reshard(self.unembed, rules.gathered("vocab", "w_embed"))
        out = rules.spec("batch", "time", "vocab")
        logits = matmul(hidden, w, out_sharding=out, dtype=jnp.float32)
        if (change := self.head_change(hidden, rules)) is not None:
            low, b = change
            b = jax.reshard(b, rules.gathered("vocab", None))
            logits = logits + matmul(low, b, out_sharding=out, dtype=jnp.float32)
        cap = self.cfg.logit_softcap
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    def head_change(
        self, hidden: Float[Array, "B T D"], rules: Rules
    ) -> tuple[Float[Array, "B T R"], Float[Array, "V R"]] | None:
        """(l, B) of an adapter of the unembedding, which adds l Bᵀ to the logits; None without."""
        adapter = self.lora["lm_head"]
        return None if adapter is None else (adapter.low(hidden, rules), adapter.b)

    def scores(self, hidden: Float[Array, "B T D"], rules: Rules) -> Float[Array, "B T"]:
        """One float32 number per token, from the head "score"."""
        if self.score is None:
            raise ValueError(
                f"this {self.cfg.family} model has the heads {self.cfg.heads} and so no scores; "
                "load it with heads=('score',)"
            )
        w = gather_matrix(self.score, rules, (None, "w_embed"), 1)
        out = rules.spec("batch", "time", None)
        return matmul(hidden, w, out_sharding=out, dtype=jnp.float32)[..., 0]


@functools.cache
def decoder_specs(cfg: DecoderConfig) -> Decoder:
    """The model as a tree of ParamSpecs, read by init, sharding, import and export.

    All callers share one tree per config: change none in place.
    """
    return Decoder(cfg)


def with_heads(model: Decoder, heads: tuple[str, ...]) -> Decoder:
    """The same arrays, restricted to these heads."""
    return restrict(model, dataclasses.replace(model.cfg, heads=heads))


def restrict(model: Decoder, cfg: DecoderConfig) -> Decoder:
    """The same arrays as a model of `cfg`, which has a part of the model's parameters."""
    leaves = dict(jax.tree_util.tree_leaves_with_path(model))
    specs = decoder_specs(cfg)
    return jax.tree.map_with_path(lambda path, _: leaves[path], specs, is_leaf=is_spec)


def init_model(
    cfg: DecoderConfig, *, seed: int, rules: Rules, dtype: DTypeLike = jnp.float32
) -> Decoder:
    """A randomly initialized model on the current mesh."""
    return init_params(jax.random.key(seed), decoder_specs(cfg), rules, dtype)


def run_layers(
    model: Decoder,
    x: Float[Array, "B T D"],
    positions: Int[Array, "B T"],
    attend: Attend,
    state: KVCache | None,
    *,
    live: Live,
    rules: Rules,
    remat: str,
) -> tuple[Float[Array, "B T D"], KVCache | None, RouterLoad | None]:
    """Runs all layers in order: a scan over stacked layers, a loop over a list.

    `state` passes from layer to layer; as a scan carry it is updated in place. In a list, `attend`
    gets each layer's part as the cache of a model of one layer. `remat` is config.learner.remat
    (jaxrl/config/remat.py).
    """
    if model.cfg.stacked:
        (layer, *rest), experts = stacked_layers(model, rules), None
        if state is not None and model.cfg.E and keeps_stack(rules):
            layer, experts = _without_experts(layer)
        return scan_layers(
            model.cfg,
            (layer, *rest),
            x,
            positions,
            attend,
            state,
            experts=experts,
            live=live,
            rules=rules,
            remat=remat,
        )
    per_layer = _rotations(model.cfg)

    def step(policy: str) -> Callable:
        layer_fn = _layer_fn(live, positions, attend, rules, policy, traced_windows=False)
        # Layers with the same window are traced and lowered once; XLA inlines the calls.
        layer_fn = jax.jit(layer_fn, static_argnames=("window", "layer_index"))

        def one(carry, layer: Layer, i: int):
            (x, state), rotation = carry, jax.tree.map(operator.itemgetter(i), per_layer)
            if model.cfg.lora is None:  # otherwise frozen weights would get gradients
                x, layer = finish_gradients(x, layer)
            own = None if state is None else state.layer(i)
            x, own, load = layer_fn(layer, x, rotation, model.cfg.window(i), 0, own)
            return (x, None if state is None else state.with_layer(i, own)), load

        return one

    (x, state), load = loop_remat(step, (x, state), list(model.layers), parse_remat(remat))
    return x, state, load


def stacked_layers(model: Decoder, rules: Rules) -> tuple:
    """Inputs of `scan_layers`: (layers, rotations, windows, indices), each with a leading L."""
    cfg = model.cfg
    # A traced window cannot be 0 for "none", so such layers get the largest one.
    windows = [cfg.window(i) or np.iinfo(np.int32).max for i in range(cfg.L)]

    def shard_layers(param: jax.Array) -> jax.Array:
        spec = jax.typeof(param).sharding.spec
        return jax.reshard(param, jax.P(*rules.spec("layers"), *spec[1:]))

    layers = jax.tree.map(shard_layers, model.layers)
    return (
        layers,
        jax.tree.map(jnp.asarray, _rotations(cfg)),
        jnp.asarray(windows, jnp.int32),
        jnp.arange(cfg.L),
    )


def scan_layers(
    cfg: DecoderConfig,
    layers: tuple,
    x: Float[Array, "B T D"],
    positions: Int[Array, "B T"],
    attend: Attend,
    state: Any,
    *,
    experts: dict[str, ExpertMatrix] | None = None,
    live: Live,
    rules: Rules,
    remat: str,
    in_loop: bool = False,
) -> tuple[Float[Array, "B T D"], Any, RouterLoad | None]:
    """`run_layers` over all or some of the layers of `stacked_layers`.

    `in_loop`: the same layers run several times, in a loop. Their weights are gathered every time.

    `experts` are the experts' matrices of all L layers, which `layers` then lack. The scan slices
    what it scans, and a slice that a custom call reads is a copy: in decode, of every expert of a
    layer, also of those without a token.
    """
    traced_windows = any(cfg.windows)

    def step(policy: str) -> Callable:
        layer_fn = _layer_fn(
            live, positions, attend, rules, policy, traced_windows=traced_windows, in_loop=in_loop
        )

        def body(carry, per_layer):
            (x, state), (layer, rotation, window, layer_index) = carry, per_layer
            window = window if traced_windows else 0
            if experts is not None:
                layer = _with_experts(layer, experts, layer_index)
            x, state, load = layer_fn(layer, x, rotation, window, layer_index, state)
            return (x, state), load

        return body

    (x, state), load = scan_remat(step, (x, state), layers, parse_remat(remat))
    return x, state, load


def _without_experts(layers: Layer) -> tuple[Layer, dict[str, ExpertMatrix]]:
    """(stacked layers without the matrices of their experts, these matrices)."""
    assert isinstance(layers.mlp, MoE)
    new = jax.tree.map(lambda leaf: leaf, layers)
    new.mlp, experts = layers.mlp.take_stack()
    return new, experts


def _with_experts(layer: Layer, experts: dict[str, ExpertMatrix], index: Int[Array, ""]) -> Layer:
    """The layer `index`, whose experts are in the stack of all layers."""
    assert isinstance(layer.mlp, MoE)
    new = jax.tree.map(lambda leaf: leaf, layer)
    new.mlp = layer.mlp.with_stack(experts, index)
    return new


def _rotations(cfg: DecoderConfig) -> Rotation:
    return rotations([cfg.layer_rope(i) for i in range(cfg.L)], cfg.H)


def _layer_fn(
    live,
    positions,
    attend: Attend,
    rules: Rules,
    policy: str,
    *,
    traced_windows: bool,
    in_loop: bool = False,
):
    def layer_fn(layer: Layer, x, rotation, window, layer_index, state):
        x = layer_input(x, policy)
        if in_loop:
            # XLA otherwise gathers the weights of all layers before the loop. Outside this
            # function, the barrier would be a copy of all weights per iteration for backward.
            layer, x = jax.lax.optimization_barrier((layer, x))
        return layer(x, live, positions, rotation, window, layer_index, attend, state, rules)

    # A window that is a Python int stays static: 0 means "none" only there.
    return recompute(layer_fn, policy, static_argnums=() if traced_windows else (3,))


@jax.custom_vjp
def finish_gradients(x: jax.Array, layer: Layer) -> tuple[jax.Array, Layer]:
    """Identity; in backward, the gradient of x waits for all gradients of the layer.

    XLA otherwise runs the backward passes of all layers first, and keeps what the gradients of
    their weights need.
    """
    return x, layer


finish_gradients.defvjp(
    lambda x, layer: ((x, layer), None), lambda _, grads: jax.lax.optimization_barrier(grads)
)
