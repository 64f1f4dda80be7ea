"""Decoder-only transformer: Flax NNX modules, used as plain pytrees.

B rows, T tokens, D model, N heads, K kv heads, H head dim, F feed-forward, V vocabulary, L layers.
Training and rollout call the same `Decoder`; they differ only in the `RowOps` they pass.
Each layer has the parameters and the computation that its `LayerConfig` describes.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxrl.config.remat import parse_remat
from jaxrl.kernels.bits import materialize
from jaxrl.kernels.matmul import matmul
from jaxrl.models.cache_layout import cache_places
from jaxrl.models.config import DecoderConfig, LayerConfig, MoEConfig
from jaxrl.models.kv_cache import KVCache
from jaxrl.models.layer_places import layer_place, stacked_places, with_inputs
from jaxrl.models.layers.experts import ExpertMatrix
from jaxrl.models.layers.layer_inputs import LayerInput, LayerInputs
from jaxrl.models.layers.linear import MakeParam, make_spec
from jaxrl.models.layers.mixers import MIXERS
from jaxrl.models.layers.mlp import MLP, SharedExpert
from jaxrl.models.layers.moe import MoE, keeps_stack
from jaxrl.models.layers.norms import LayerNorm, RMSNorm, make_norm
from jaxrl.models.layers.router import Live, RouterLoad
from jaxrl.models.layers.row_ops import LayerPlace, RowOps
from jaxrl.models.layers.tables import table_adapters
from jaxrl.models.remat import finish_gradients, layer_input, loop_remat, recompute, scan_remat
from jaxrl.models.router_replay import with_experts
from jaxrl.models.shared_kv import KeptKV
from jaxrl.models.spec import init_params, is_spec
from sharding import Rules, gather_matrix


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
        return x, state, load

    def _add(self, x: jax.Array, h: jax.Array, norm: RMSNorm | LayerNorm | None) -> jax.Array:
        """The residual stream with the output of the mixer or of the MLP."""
        h = h if norm is None else norm(h)
        return x + (
            h if self.residual_scale == 1 else h * jnp.asarray(self.residual_scale, h.dtype)
        )


class Decoder(nnx.Module):
    """Embedding, L layers, final norm and the heads of its config.

    Stacked layers are one `Layer` if all are equal, else one for each place of a repeating period
    (`layer_runs`), in a list.

    Heads are the unembedding ("vocab") and a linear map to one number ("score": a value or a
    reward). `decoder_specs` builds its parameter table.
    """

    def __init__(self, cfg: DecoderConfig):
        top = make_spec("")
        self.cfg = cfg
        self.layers: Any

        def table(name: str) -> Any:
            return top(name, (cfg.V, cfg.D), ("vocab", "w_embed"), hf_shape=(cfg.V, cfg.D))

        self.embed = nnx.data(table("model.embed_tokens.weight"))
        if cfg.stacked:
            stacks = [
                Layer(make_spec("model.layers.{layer}.", place), cfg, cfg.layers[place.start])
                for run in cfg.runs
                for place in run
            ]
            self.layers = nnx.List(stacks) if len(stacks) > 1 else stacks[0]
        else:
            self.layers = nnx.List(
                [
                    Layer(make_spec(f"model.layers.{i}."), cfg, layer)
                    for i, layer in enumerate(cfg.layers)
                ]
            )
        self.norm = make_norm(top, cfg.final_norm, cfg, unit_offset=cfg.final_unit_offset)
        without = RMSNorm(top, None, cfg.D, eps=cfg.norm_eps, unit_offset=False)
        self.embed_norm = without if cfg.embed_norm else None
        self.layer_inputs = LayerInputs(top, cfg) if cfg.input_P else None
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
        rows: RowOps,
        state: Any = None,
        *,
        live: Live,
        rules: Rules,
        remat: str = "none",
        experts: Int[Array, "L B T k"] | None = None,
    ) -> tuple[Float[Array, "B T D"], Any, RouterLoad | None]:
        """(final hidden states, state after the last layer, router load with layers first).

        `state` is passed through `attend`: the KV cache in rollout. `live` is not
        zero at tokens that are not padding; the load of a mixture of experts counts these as often
        as it says, and is None for a dense model. `experts` are those to replay, of the layers with
        experts.
        """
        x = self.embed_tokens(tokens, rules)
        inputs = None if self.layer_inputs is None else self.layer_inputs(tokens, x, rules)
        x = jax.reshard(x, rules.residual_spec(x.shape))
        x, state, load = run_layers(
            self,
            x,
            positions,
            rows,
            state,
            experts,
            inputs=inputs,
            live=live,
            rules=rules,
            remat=remat,
        )
        return jax.reshard(self.finish(x), rules.spec("batch", "time", "embed")), state, load

    def finish(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """The input of the heads, of the output of the last layer."""
        x, scale = self.norm(x), self.cfg.logit_scale
        return x if scale == 1 else x * jnp.asarray(scale, x.dtype)

    def embed_tokens(self, tokens: Int[Array, "B T"], rules: Rules) -> Float[Array, "B T D"]:
        """Input of the first layer."""
        table = gather_matrix(self.embed, rules, ("vocab", "w_embed"), 1)
        x = table.at[tokens].get(out_sharding=rules.spec("batch", "time", "embed"))
        if (adapter := self.lora["embed"]) is not None:
            x = x + adapter.rows(tokens, rules)
        x = x if self.embed_norm is None else self.embed_norm(x)
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
    rows: RowOps,
    state: KVCache | KeptKV | None,
    experts: Int[Array, "L B T k"] | None,
    *,
    inputs: Float[Array, "L B T P"] | None,
    live: Live,
    rules: Rules,
    remat: str,
) -> tuple[Float[Array, "B T D"], KVCache | KeptKV | None, RouterLoad | None]:
    """Runs all layers in order: a scan over stacked layers, a loop over a list.

    `state` passes from layer to layer; as a scan carry it is updated in place. In a list, `attend`
    gets each layer's part as the cache of a model of one layer. `remat` is config.learner.remat
    (jaxrl/config/remat.py).
    """
    cfg = model.cfg
    if cfg.stacked:
        layers, places = stacked_layers(model, rules)
        places = places if inputs is None else with_inputs(cfg, places, inputs)
        return scan_layers(
            cfg,
            layers,
            with_experts(cfg, places, experts),
            x,
            positions,
            rows,
            state,
            keep_experts=isinstance(state, KVCache) and keeps_stack(rules),
            live=live,
            rules=rules,
            remat=remat,
        )
    places = with_experts(cfg, [layer_place(cfg, i, inputs) for i in range(cfg.L)], experts)
    caches = [place.layer for place in cache_places(cfg)]

    def step(policy: str) -> Callable:
        layer_fn = _layer_fn(live, positions, rows, rules, policy)
        # Layers with the same window are traced and lowered once; XLA inlines the calls.
        layer_fn = jax.jit(layer_fn, static_argnames="window")

        def one(carry, layer: Layer, i: int):
            x, state = carry
            if cfg.lora is None:  # otherwise frozen weights would get gradients
                x, layer = finish_gradients(x, layer)
            own = None if state is None else state.layer(caches[i])
            x, own, load = layer_fn(layer, x, places[i], cfg.window(i), own)
            return (x, None if state is None else state.with_layer(caches[i], own)), load

        return one

    (x, state), loads = loop_remat(step, (x, state), list(model.layers), parse_remat(remat))
    loads = [load for load in loads if load is not None]
    return x, state, jax.tree.map(lambda *of: jnp.stack(of), *loads) if loads else None


def stacked_layers(model: Decoder, rules: Rules) -> tuple[Any, list[LayerPlace]]:
    """(layers of the model with their leading axes sharded, one LayerPlace for each stack)."""

    def shard_layers(param: jax.Array) -> jax.Array:
        spec = jax.typeof(param).sharding.spec
        return jax.reshard(param, jax.P(*rules.spec("layers"), *spec[1:]))

    return jax.tree.map(shard_layers, model.layers), stacked_places(model.cfg)


def scan_layers(
    cfg: DecoderConfig,
    layers: Any,
    places: list[LayerPlace],
    x: Float[Array, "B T D"],
    positions: Int[Array, "B T"],
    rows: RowOps,
    state: Any,
    *,
    keep_experts: bool = False,
    live: Live,
    rules: Rules,
    remat: str,
    in_loop: bool = False,
) -> tuple[Float[Array, "B T D"], Any, RouterLoad | None]:
    """`run_layers` over all or some of the layers of `stacked_layers`.

    Every run of layers is a scan over the repetitions of its period.

    `in_loop`: the same layers run several times, in a loop. Their weights are gathered every time.

    `keep_experts`: the scans read the experts' matrices of all layers in place, and slice the rest.
    A slice that a custom call reads is a copy: in decode, of every expert of a layer, also of those
    without a token.
    """
    stacks = [layers] if isinstance(layers, Layer) else list(layers)
    sizes = [jax.tree.leaves(place)[0].shape[0] for place in places]  # fewer in a pipeline stage
    loads, start, first = [], 0, 0
    for run in cfg.runs:
        period = slice(first, first := first + len(run))
        chosen, experts = stacks[period], [None] * len(run)
        if keep_experts:
            chosen, experts = zip(*map(_without_experts, chosen), strict=True)
        layer_fn = functools.partial(_layer_fn, live, positions, rows, rules, in_loop=in_loop)
        stop = start + sum(sizes[period])
        (x, state), load = scan_remat(
            functools.partial(_period_step, cfg, run, experts, layer_fn),
            (x, state),
            tuple(zip(chosen, places[period], strict=True)),
            parse_remat(remat).ranges(sum(sizes), start, stop),
            period=len(run),
        )
        loads, start = [*loads, *([] if load is None else [load])], stop
    return x, state, jax.tree.map(lambda *of: jnp.concatenate(of), *loads) if loads else None


def _period_step(
    cfg: DecoderConfig,
    run: tuple[range, ...],
    experts: Sequence[dict[str, ExpertMatrix] | None],
    layer_fn: Callable[..., Callable],
    policy: str,
) -> Callable:
    """The body of a scan over the repetitions of a run's period."""

    def body(carry, period):
        (x, state), loads = carry, []
        for layers, matrices, (layer, place) in zip(run, experts, period, strict=True):
            if matrices is not None:
                index = (place.index - layers.start) // layers.step
                layer = _with_experts(layer, matrices, index)
            static = place.window is None
            window = cfg.window(layers.start) if static else place.window
            if len(run) > 1 and cfg.lora is None:  # a scan of one layer finishes them by itself
                x, layer = finish_gradients(x, layer)
            pool = cache_places(cfg)[layers.start].pool
            own = None if state is None else state.pool(pool)
            x, own, load = layer_fn(policy, static)(layer, x, place, window, own)
            state = None if state is None else state.with_pool(pool, own)
            loads += [] if load is None else [load]
        stacked = jax.tree.map(lambda *of: jnp.stack(of), *loads) if loads else None
        return (x, state), stacked

    return body


def _without_experts(layers: Layer) -> tuple[Layer, dict[str, ExpertMatrix] | None]:
    """(stacked layers without the matrices of their experts, these matrices if there are any)."""
    if not isinstance(layers.mlp, MoE):
        return layers, None
    new = jax.tree.map(lambda leaf: leaf, layers)
    new.mlp, experts = layers.mlp.take_stack()
    return new, experts


def _with_experts(layer: Layer, experts: dict[str, ExpertMatrix], index: Int[Array, ""]) -> Layer:
    """The layer `index`, whose experts are in the stack of all layers."""
    assert isinstance(layer.mlp, MoE)
    new = jax.tree.map(lambda leaf: leaf, layer)
    new.mlp = layer.mlp.with_stack(experts, index)
    return new


def _layer_fn(
    live,
    positions,
    rows: RowOps,
    rules: Rules,
    policy: str,
    static_window: bool = True,
    *,
    in_loop: bool = False,
):
    def layer_fn(layer: Layer, x, place: LayerPlace, window, state):
        x = layer_input(x, policy)
        if in_loop:
            # XLA otherwise gathers the weights of all layers before the loop. Outside this
            # function, the barrier would be a copy of all weights per iteration for backward.
            layer, x = jax.lax.optimization_barrier((layer, x))
        return layer(x, live, positions, place, window, rows, state, rules)

    # A window that is a Python int stays static: 0 means "none" only there.
    return recompute(layer_fn, policy, static_argnums=(3,) if static_window else ())
