"""A decoder-only transformer: Flax NNX modules, used as plain pytrees.

B rows, T tokens, D model, N heads, K kv heads, H head dim, F feed-forward, V vocabulary, L layers.
Training and rollout call the same `Decoder`; they differ only in the `attend` they hand it.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxrl.kernels.attention import attention
from jaxrl.kernels.cpu.skinny_matmul import matmul
from jaxrl.kernels.ring_attention import ring_attention
from jaxrl.models.config import DecoderConfig
from jaxrl.models.layers.linear import Linear, MakeParam, each, make_spec
from jaxrl.models.layers.mlp import MLP
from jaxrl.models.layers.moe import MoE, RouterLoad
from jaxrl.models.layers.norms import RMSNorm
from jaxrl.models.layers.rope import inverse_frequencies, rotate
from jaxrl.models.pipeline import run_stages
from jaxrl.models.spec import init_params, is_spec
from sharding import Rules, gather_matrix, target_platform

# (q [B,T,N,H], k [B,T,K,H], v [B,T,K,H], window, number of the layer, state) -> (out [B,T,N,H], state)
Attend = Callable[..., tuple[jax.Array, Any]]
REMAT_POLICIES = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "none": None,
}


def unfused(projected: jax.Array) -> jax.Array:
    """Itself. On TPU it is written to memory first, and so is its gradient: libtpu 0.0.51 aborts where it fuses
    the norm of a head with the projection ("split of a padded window dim")."""
    return jax.lax.optimization_barrier(projected) if target_platform() == "tpu" else projected


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions; the products with keys are the caller's."""

    def __init__(self, make: MakeParam, cfg: DecoderConfig):
        def project(name: str, letter: str, heads: int, axis: str) -> Linear:
            eq = f"BTD,{letter}HD->BT{letter}H"
            shape, axes = (heads, cfg.H, cfg.D), (axis, None, "w_embed")
            hf_shape = (heads * cfg.H, cfg.D)
            return Linear(make, name, eq, shape, axes, hf_shape=hf_shape, bias=cfg.qkv_bias)

        self.q = project("self_attn.q_proj", "N", cfg.N, "heads")
        self.k = project("self_attn.k_proj", "K", cfg.K, "kv_heads")
        self.v = project("self_attn.v_proj", "K", cfg.K, "kv_heads")
        self.o = Linear(
            make,
            "self_attn.o_proj",
            "BTNH,DNH->BTD",
            (cfg.D, cfg.N, cfg.H),
            ("w_embed", "heads", None),
            hf_shape=(cfg.D, cfg.N * cfg.H),
            bias=cfg.o_bias,
        )

        def norm(name: str) -> RMSNorm | None:
            if not cfg.qk_norm:
                return None
            return RMSNorm(make, name, cfg.H, eps=cfg.norm_eps, unit_offset=cfg.unit_offset)

        self.q_norm, self.k_norm = norm("self_attn.q_norm"), norm("self_attn.k_norm")

    def __call__(self, x, positions, inv_freq, window, number, attend: Attend, state, rules: Rules):
        q, k, v = each(x, self.q, self.k, self.v, rules=rules)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(unfused(q)), self.k_norm(unfused(k))
        q, k = rotate(q, positions, inv_freq), rotate(k, positions, inv_freq)
        out, state = attend(q, k, v, window, number, state)
        return self.o(out, rules), state


class Layer(nnx.Module):
    """One residual block. Gemma adds a second norm behind attention and behind the MLP."""

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
        self, x, live, positions, inv_freq, window, number, attend: Attend, state, rules: Rules
    ):
        """(x, state, router load or None)."""
        h = self.attn_norm(x)
        h, state = self.attn(h, positions, inv_freq, window, number, attend, state, rules)
        x = x + (h if self.post_attn_norm is None else self.post_attn_norm(h))
        h, load = self.mlp_norm(x), None
        if isinstance(self.mlp, MoE):
            h, load = self.mlp(h, live, rules)
        else:
            h = self.mlp(h, rules)
        return x + (h if self.post_mlp_norm is None else self.post_mlp_norm(h)), state, load


class Decoder(nnx.Module):
    """Embedding, L layers, final norm, and the heads of its config: the unembedding, or a linear map to one
    number (a value, a reward). `decoder_specs` builds its parameter table."""

    def __init__(self, cfg: DecoderConfig):
        top = make_spec("")
        vocab = dict(axes=("vocab", "w_embed"), hf_shape=(cfg.V, cfg.D))
        self.cfg = cfg
        self.layers: Any  # one Layer of stacked parameters, or a list
        self.embed = nnx.data(top("model.embed_tokens.weight", (cfg.V, cfg.D), **vocab))
        if cfg.stacked:
            self.layers = Layer(make_spec("model.layers.{layer}.", cfg.L), cfg)
        else:
            self.layers = nnx.List(
                [Layer(make_spec(f"model.layers.{i}."), cfg) for i in range(cfg.L)]
            )
        self.norm = RMSNorm(top, "model.norm", cfg.D, eps=cfg.norm_eps, unit_offset=cfg.unit_offset)
        own = "vocab" in cfg.heads and not cfg.tied
        self.lm_head = nnx.data(top("lm_head.weight", (cfg.V, cfg.D), **vocab) if own else None)
        self.score = nnx.data(
            top("score.weight", (1, cfg.D), (None, "w_embed"), init="zeros")
            if "score" in cfg.heads
            else None
        )

    @property
    def unembed(self) -> jax.Array:
        """[V, D]; the embedding itself where the two are tied. Raises ValueError without that head."""
        if "vocab" not in self.cfg.heads:
            raise ValueError(
                f"this {self.cfg.family} model has the heads {self.cfg.heads} and so no logits; load it with "
                "heads=('vocab',)"
            )
        return self.embed if self.lm_head is None else self.lm_head

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        attend: Attend,
        state: Any = None,
        *,
        live: Bool[Array, "B T"],
        rules: Rules,
        remat: str = "none",
    ) -> tuple[Float[Array, "B T D"], Any, RouterLoad | None]:
        """Final hidden states, the state (the KV cache) as `attend` of the last layer left it, and what the
        routers of a mixture of experts did with the `live` tokens, layers first."""
        x = self.embedded(tokens, rules)
        x, state, load = run_layers(
            self, x, positions, attend, state, live=live, rules=rules, remat=remat
        )
        return self.norm(x), state, load

    def embedded(self, tokens: Int[Array, "B T"], rules: Rules) -> Float[Array, "B T D"]:
        """What the first layer sees."""
        table = gather_matrix(self.embed, rules, ("vocab", "w_embed"), 1)
        x = table.at[tokens].get(out_sharding=rules.spec("batch", "time", "embed"))
        return x * jnp.asarray(self.cfg.embed_scale, x.dtype)

    def logits(self, hidden: Float[Array, "B T D"], rules: Rules) -> Float[Array, "B T V"]:
        """float32 logits, soft-capped where the family does."""
        w = jax.reshard(self.unembed, rules.gathered("vocab", "w_embed"))
        out = rules.spec("batch", "time", "vocab")
        logits = matmul(hidden, w, out_sharding=out, dtype=jnp.float32)
        cap = self.cfg.logit_softcap
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    def scores(self, hidden: Float[Array, "B T D"], rules: Rules) -> Float[Array, "B T"]:
        """One float32 number a token, of the head "score"."""
        if self.score is None:
            raise ValueError(
                f"this {self.cfg.family} model has the heads {self.cfg.heads} and so no scores; load it with "
                "heads=('score',)"
            )
        w = gather_matrix(self.score, rules, (None, "w_embed"), 1)
        out = rules.spec("batch", "time", None)
        return matmul(hidden, w, out_sharding=out, dtype=jnp.float32)[..., 0]


def decoder_specs(cfg: DecoderConfig) -> Decoder:
    """The model as a tree of ParamSpecs; init, shardings and HF import and export all read it."""
    return Decoder(cfg)


def with_heads(model: Decoder, heads: tuple[str, ...]) -> Decoder:
    """The same arrays, without those of other heads."""
    leaves = dict(jax.tree_util.tree_leaves_with_path(model))
    specs = decoder_specs(dataclasses.replace(model.cfg, heads=heads))
    return jax.tree.map_with_path(lambda path, _: leaves[path], specs, is_leaf=is_spec)


def init_model(
    cfg: DecoderConfig, *, seed: int, rules: Rules, dtype: DTypeLike = jnp.float32
) -> Decoder:
    """A randomly initialised model on the mesh that is set."""
    return init_params(jax.random.key(seed), decoder_specs(cfg), rules, dtype)


def run_layers(
    model: Decoder,
    x: Float[Array, "B T D"],
    positions: Int[Array, "B T"],
    attend: Attend,
    state: Any,
    *,
    live: Bool[Array, "B T"],
    rules: Rules,
    remat: str,
) -> tuple[Float[Array, "B T D"], Any, RouterLoad | None]:
    """All layers in order: a scan where they are stacked, a loop where they are a list.

    `state` goes from layer to layer; carried, it is updated in place. `remat` names what the backward pass
    may keep: "none" everything, "dots" the results of weight products, "full" the layer inputs.
    """
    if model.cfg.stacked:
        layers = stacked_layers(model, rules)
        return scan_layers(
            model.cfg, layers, x, positions, attend, state, live=live, rules=rules, remat=remat
        )
    layer_fn = _layer_fn(live, positions, attend, rules, remat, traced_windows=False)
    return _listed_layers(model, layer_fn, x, _frequencies(model.cfg), state)


def stacked_layers(model: Decoder, rules: Rules) -> tuple:
    """What `scan_layers` goes through: (layers, frequencies, windows, numbers), each with a leading L."""
    cfg = model.cfg
    # Traced, a layer without a window sees as far as any position goes.
    windows = [cfg.window(i) or np.iinfo(np.int32).max for i in range(cfg.L)]

    def lay(param: jax.Array) -> jax.Array:
        spec = jax.typeof(param).sharding.spec
        return jax.reshard(param, jax.P(*rules.spec("layers"), *spec[1:]))

    layers = jax.tree.map(lay, model.layers)
    return (
        layers,
        jnp.asarray(_frequencies(cfg)),
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
    live: Bool[Array, "B T"],
    rules: Rules,
    remat: str,
) -> tuple[Float[Array, "B T D"], Any, RouterLoad | None]:
    """`run_layers` over (some of) the layers of `stacked_layers`."""
    traced_windows = any(cfg.windows)
    layer_fn = _layer_fn(live, positions, attend, rules, remat, traced_windows=traced_windows)

    def body(carry, per_layer):
        (x, state), (layer, inv_freq, window, number) = carry, per_layer
        window = window if traced_windows else 0
        x, state, load = layer_fn(layer, x, inv_freq, window, number, state)
        return (x, state), load

    (x, state), load = jax.lax.scan(body, (x, state), layers)
    return x, state, load


def _frequencies(cfg: DecoderConfig) -> np.ndarray:
    return np.stack([inverse_frequencies(cfg.layer_rope(i), cfg.H) for i in range(cfg.L)])


def _layer_fn(live, positions, attend: Attend, rules: Rules, remat: str, *, traced_windows: bool):
    def layer_fn(layer: Layer, x, inv_freq, window, number, state):
        return layer(x, live, positions, inv_freq, window, number, attend, state, rules)

    if remat == "none":
        return layer_fn
    # A window that is a Python number stays one: 0 means none only there.
    static = () if traced_windows else (3,)
    return jax.checkpoint(layer_fn, policy=REMAT_POLICIES[remat], static_argnums=static)


def _listed_layers(model: Decoder, layer_fn: Callable, x, freqs: np.ndarray, state: Any):
    """`run_layers` over a list of layers."""
    loads = []
    for i, layer in enumerate(model.layers):
        x, state, load = layer_fn(layer, x, freqs[i], model.cfg.window(i), i, state)
        loads.append(load)
    return x, state, jax.tree.map(lambda *per_layer: jnp.stack(per_layer), *loads)


def forward_packed(
    model: Decoder,
    tokens: Int[Array, "B T"],
    segments: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    *,
    rules: Rules,
    remat: str = "none",
    implementation: str | None = None,
) -> Float[Array, "B T D"]:
    """Final hidden states of packed rows; a token attends causally within its own segment.

    Under rules with `ring` the rows lie in zig-zag order (sharding/order.py); where the rules cut layers,
    rows go through them as through a pipeline (pipeline.py).
    """
    return forward_routed(
        model,
        tokens,
        segments,
        positions,
        rules=rules,
        remat=remat,
        implementation=implementation,
    )[0]


def forward_routed(
    model: Decoder,
    tokens: Int[Array, "B T"],
    segments: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    *,
    rules: Rules,
    remat: str = "none",
    implementation: str | None = None,
) -> tuple[Float[Array, "B T D"], RouterLoad | None]:
    """`forward_packed`, and what the routers of a mixture of experts did: None of a dense model."""
    cfg = model.cfg
    attend_rows = ring_attention if rules.ring else attention

    def attend_to(segments, rules: Rules) -> Attend:
        spec = cfg.attention_spec(rules)

        def attend(q, k, v, window, number, state):
            out = attend_rows(
                q,
                k,
                v,
                spec=spec,
                segments=segments,
                window=window,
                implementation=implementation,
            )
            return out, state

        return attend

    if rules.layers is None:
        attend, live = attend_to(segments, rules), segments > 0
        hidden, _, load = model(tokens, positions, attend, live=live, rules=rules, remat=remat)
        return hidden, load
    inside = rules.in_stage()

    def stage(layers, x, positions, segments):
        attend, live = attend_to(segments, inside), segments > 0
        x, _, _ = scan_layers(
            cfg, layers, x, positions, attend, None, live=live, rules=inside, remat=remat
        )
        return x

    x = model.embedded(tokens, rules)
    layers = stacked_layers(model, rules)
    return model.norm(run_stages(stage, layers, x, (positions, segments), rules=rules)), None
