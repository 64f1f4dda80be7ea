"""The decoder on packed rows, for training and scoring."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxrl.kernels.attention import attention
from jaxrl.kernels.attention_spec import AttentionSpec
from jaxrl.kernels.gated_delta import causal_conv, gated_delta
from jaxrl.kernels.gated_delta.convolution import identity
from jaxrl.kernels.gated_delta.rows import from_whole_rows, to_whole_rows, whole_row_rules
from jaxrl.kernels.ring_attention import ring_attention
from jaxrl.kernels.visibility import Visibility
from jaxrl.models.cache_layout import kept_layers
from jaxrl.models.config import DecoderConfig
from jaxrl.models.decoder import Decoder
from jaxrl.models.image_features import (
    ImageFeatures,
    PackedPatches,
    check_images,
    image_visibility,
)
from jaxrl.models.layer_loop import scan_layers, stacked_layers
from jaxrl.models.layers.gated_delta_net import queries_and_keys
from jaxrl.models.layers.linear import Linear
from jaxrl.models.layers.mla import LatentHeads
from jaxrl.models.layers.mlp import MLP
from jaxrl.models.layers.moe import MoE
from jaxrl.models.layers.router import RouterLoad
from jaxrl.models.layers.row_ops import LayerPlace
from jaxrl.models.lora import combine, split
from jaxrl.models.pipeline import run_stages, to_micro_batches
from jaxrl.models.pipeline_1f1b import gradients_1f1b
from jaxrl.models.router_replay import with_experts
from jaxrl.models.shared_kv import KeptKV, SharedKV, empty_kv
from jaxrl.types import Tree
from sharding import Rules, target_platform, unshuffle


def forward_packed(
    model: Decoder,
    tokens: Int[Array, "B T"],
    segments: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    *,
    features: ImageFeatures | None = None,
    axis_positions: Int[Array, "B T 3"] | None = None,
    rules: Rules,
    remat: str = "none",
    implementation: str | None = None,
    matmul_dtype: str = "auto",
    mlp_chunk: int = 0,
) -> Float[Array, "B T D"]:
    """Final hidden states of packed rows; a token attends causally within its own segment.

    Under rules with `ring`, rows are in zig-zag order (sharding/rules.py). Rules that shard layers
    run them as a pipeline (pipeline.py).
    """
    return forward_routed(
        model,
        tokens,
        segments,
        positions,
        features=features,
        axis_positions=axis_positions,
        rules=rules,
        remat=remat,
        implementation=implementation,
        matmul_dtype=matmul_dtype,
        mlp_chunk=mlp_chunk,
    )[0]


def forward_routed(
    model: Decoder,
    tokens: Int[Array, "B T"],
    segments: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    *,
    until: Int[Array, "B T"] | None = None,
    copies: Int[Array, "B T"] | None = None,
    experts: Int[Array, "B T L k"] | None = None,
    features: ImageFeatures | PackedPatches | None = None,
    axis_positions: Int[Array, "B T 3"] | None = None,
    rules: Rules,
    remat: str = "none",
    implementation: str | None = None,
    matmul_dtype: str = "auto",
    mlp_chunk: int = 0,
    segment_align: int = 1,
) -> tuple[Float[Array, "B T D"], RouterLoad | None]:
    """`forward_packed` and the router load of a mixture of experts (None for a dense model).

    With `until`, the last place of the row that sees each token, segments share prefixes
    (kernels/visibility.py). The load counts a token as often as `copies` says, or once.
    `matmul_dtype` "int8" or "fp8" quantizes the products of linear layers
    (kernels/quantized_matmul.py), except those of experts and adapters. `mlp_chunk` is the
    number of tokens of a device whose MLP is computed at one time; 0 = all. Segments that share
    prefixes begin at multiples of `segment_align` tokens. `experts` are replayed where they are not
    negative (models/router_replay.py). `features` replace the embeddings of the tokens of images
    (models/image_features.py), which the model's own tower computes of patches; `axis_positions`
    are the positions by axis of a model that has them, next to `positions`, the index in the
    sequence.
    """
    if isinstance(features, PackedPatches):
        features = model.encode_images(features, rules, remat)
    check_images(model.cfg, features, axis_positions)
    model = with_mlp_chunk(with_matmul_dtype(model, matmul_dtype), mlp_chunk)
    visibility = None if until is None else Visibility(until, positions)
    weights = segments > 0 if copies is None else copies
    rotary = positions if axis_positions is None else axis_positions
    if rules.layers is None:
        whole = image_visibility(model.cfg, features, segments, visibility, rules)
        packed = PackedRows(segments, visibility, rules, implementation, segment_align, whole)
        given = _layers_first(experts)
        kept = kept_layers(model.cfg)
        state = empty_kv(kept, tokens.shape, model.embed.dtype, rules) if kept else None
        hidden, _, load = model(
            tokens,
            rotary,
            packed,
            state,
            live=weights,
            rules=rules,
            remat=remat,
            experts=given,
            features=features,
        )
        return hidden, load
    x = _embed(model, tokens, features, rules)
    layers, places = stacked_layers(model.cfg, model.layers, rules)
    rows = rotary, segments, weights, visibility, experts
    rows = rows + _image_rows(model.cfg, features, segments, visibility, x.dtype, rules)
    stage = _stage(model.cfg, rules, remat, implementation, segment_align)
    x, load = run_stages(stage, (layers, places), x, rows, rules=rules)
    return model.finish(x), load


def pipelined_gradients(
    model: Decoder,
    objective: Callable[..., tuple[jax.Array, Tree]],
    tokens: Int[Array, "B T"],
    segments: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    rows: Tree,
    *,
    until: Int[Array, "B T"] | None = None,
    copies: Int[Array, "B T"] | None = None,
    experts: Int[Array, "B T L k"] | None = None,
    features: ImageFeatures | PackedPatches | None = None,
    axis_positions: Int[Array, "B T 3"] | None = None,
    zero_sums: Tree,
    load_gradient: RouterLoad | None,
    rules: Rules,
    remat: str,
    implementation: str | None = None,
    matmul_dtype: str = "auto",
    mlp_chunk: int = 0,
    segment_align: int = 1,
) -> tuple[Tree, Tree, RouterLoad | None]:
    """(gradient of the trained parameters, sums of the objective, router load) by 1F1B.

    `objective(model, hidden, rows)` is (loss, sums) of one row of every data-parallel rank from its
    final hidden states [ranks, T, D]; the model has no layers there, and `rows` are the further
    inputs, [B, T, ...]. `load_gradient` is the gradient of the loss with respect to the router
    load. The other arguments are those of `forward_routed`. A tower runs before the first stage,
    for all rows together.
    """
    trained, frozen = split(model)
    outside = _with_parts(trained, layers=_masked(trained.layers))
    top = _with_parts(outside, tower=_masked(trained.tower))
    layers, places = stacked_layers(model.cfg, trained.layers, rules)
    run = _stage(model.cfg, rules, remat, implementation, segment_align)

    def stage(layers, constants, x, deep, *rows):
        frozen, places = constants
        layers = combine(layers, frozen)
        layers = with_mlp_chunk(with_matmul_dtype(layers, matmul_dtype), mlp_chunk)
        return run((layers, places), x, *rows, deep)

    visibility = None if until is None else Visibility(until, positions)

    def embed(outside: Tree) -> tuple[tuple[jax.Array, jax.Array | None], Visibility | None]:
        whole, found = combine(outside, frozen), features
        if isinstance(found, PackedPatches):
            found = whole.encode_images(found, rules, remat)
        check_images(whole.cfg, found, axis_positions)
        x = _embed(whole, tokens, found, rules)
        seen, deep = _image_rows(whole.cfg, found, segments, visibility, x.dtype, rules)
        return jax.tree.map(lambda a: to_micro_batches(a, rules), (x, deep)), seen

    def loss(top: Tree, hidden: jax.Array, rows: Tree) -> tuple[jax.Array, Tree]:
        whole = combine(top, frozen)
        return objective(whole, whole.finish(hidden), rows)

    weights = segments > 0 if copies is None else copies
    rotary = positions if axis_positions is None else axis_positions
    (x, deep), pull_back, seen = jax.vjp(embed, outside, has_aux=True)
    found = gradients_1f1b(
        stage,
        loss,
        layers,
        (stacked_layers(model.cfg, frozen.layers, rules)[0], places),
        top,
        x,
        deep,
        (rotary, segments, weights, visibility, experts, seen),
        rows,
        zero_sums=zero_sums,
        load_gradient=load_gradient,
        rules=rules,
    )
    (embedded,) = pull_back((found.x, found.added))
    tower = jax.tree.map(lambda a: a.astype(jnp.float32), embedded.tower)
    embedded = _with_parts(embedded, tower=_masked(embedded.tower))
    grads = jax.tree.map(lambda a, b: a + b.astype(a.dtype), found.top, embedded)
    return _with_parts(grads, layers=found.layers, tower=tower), found.sums, found.load


@dataclasses.dataclass(frozen=True)
class PackedRows:
    """Operations between the tokens of packed rows; shared keys and values are the state."""

    segments: jax.Array  # int32 [B, T]
    visibility: Visibility | None
    rules: Rules
    implementation: str | None
    align: int = 1  # segments begin at, and share prefixes of, multiples of so many tokens
    image_visibility: Visibility | None = None  # where the tokens of an image see each other

    @property
    def heads_first(self) -> bool:
        return target_platform() == "tpu"

    def attend(self, q, k, v, spec: AttentionSpec, window, index, state, sinks=None):
        attend = ring_attention if self.rules.ring else attention
        whole = self.image_visibility if spec.whole_images else None
        out = attend(
            q,
            k,
            v,
            spec=spec,
            segments=self.segments,
            window=window,
            visibility=self.visibility if whole is None else whole,
            sinks=sinks,
            implementation=self.implementation,
        )
        return out, state

    def attend_latent(self, q, latent, heads: LatentHeads, window, index, state):
        k, v = heads.expand(latent)
        width = max(k.shape[-1], v.shape[-1])  # of kernels, which have one for keys and values

        def padded(x: jax.Array) -> jax.Array:
            missing = width - x.shape[-1]
            return jnp.pad(x, ((0, 0),) * 3 + ((0, missing),)) if missing else x

        q, k, spec = padded(q), padded(k), heads.cfg.spec(self.rules)
        out, state = self.attend(q, k, padded(v), spec, window, index, state)
        return out[..., : v.shape[-1]], state

    def share(self, k, v, shared: SharedKV, state: KeptKV):
        return state.share(k, v, shared)

    def delta(self, qk, v, g, beta, conv, index, state):
        how = self._whole()
        qk, v, g, beta = (to_whole_rows(a, self.rules) for a in (qk, v, g, beta))
        (qk, _), (v, _) = causal_conv(qk, conv[0], **how), causal_conv(v, conv[1], **how)
        out, _ = gated_delta(*queries_and_keys(qk), v, g, beta, **how)
        return from_whole_rows(out, self.rules), state

    def convolve(self, x, w, index, state):
        out, _ = causal_conv(to_whole_rows(x, self.rules), w, **self._whole(), activation=identity)
        return from_whole_rows(out, self.rules), state

    def _whole(self) -> dict[str, Any]:
        """Arguments of operations on whole rows."""
        whole = whole_row_rules(self.rules)
        order = functools.partial(unshuffle, rules=self.rules)
        segments, visibility = jax.tree.map(order, (self.segments, self.visibility))
        return dict(segments=segments, visibility=visibility, align=self.align, rules=whole)


def _embed(
    model: Decoder, tokens: Int[Array, "B T"], features: ImageFeatures | None, rules: Rules
) -> Float[Array, "B T D"]:
    """The input of a pipeline."""
    x = model.embed_tokens(tokens, rules)
    return x if features is None else features.insert(x, rules)


def _image_rows(
    cfg: DecoderConfig,
    features: ImageFeatures | None,
    segments: Int[Array, "B T"],
    visibility: Visibility | None,
    dtype: DTypeLike,
    rules: Rules,
) -> tuple[Visibility | None, Float[Array, "B T n D"] | None]:
    """Inputs of the stages for images: their visibility, and the sums of deepstack.

    Raises NotImplementedError if not all of these layers are in the first stage.
    """
    deep = None if features is None else features.deep_sums(dtype, rules)
    n_layers = cfg.L // rules.n_shards("layers")
    if deep is not None and len(deep) > n_layers:
        raise NotImplementedError(
            f"deepstack features of {len(deep)} layers in a pipeline whose first stage has "
            f"{n_layers}; set config.mesh.stage to at most {cfg.L // len(deep)}"
        )
    whole = image_visibility(cfg, features, segments, visibility, rules)
    return whole, None if deep is None else jnp.moveaxis(deep, 0, 2)


def _stage(
    cfg: DecoderConfig, rules: Rules, remat: str, implementation: str | None, segment_align: int
) -> Callable[..., tuple[jax.Array, RouterLoad | None]]:
    """The layers of one pipeline stage on packed rows."""
    inside = rules.in_stage()

    def stage(inputs, x, positions, segments, live, visibility, experts, whole, deep):
        packed = PackedRows(segments, visibility, inside, implementation, segment_align, whole)
        layers, places = inputs
        given = _layers_first(experts)
        places = places if given is None else with_experts(cfg, places, given)
        x, _, load = scan_layers(
            cfg,
            layers,
            places,
            x,
            positions,
            packed,
            None,
            deep=None if deep is None else _in_first_stage(deep, places),
            live=live,
            rules=inside,
            remat=remat,
            in_loop=True,
        )
        return x, load

    return stage


def _in_first_stage(
    deep: Float[Array, "R T n D"], places: list[LayerPlace]
) -> Float[Array, "n R T D"]:
    """The sums of the first layers of the model; zeros in other stages, which run them too."""
    first = places[0].index
    assert first is not None, "the layers of a pipeline are stacked"
    return jnp.where(first[0] == 0, jnp.moveaxis(deep, 2, 0), 0)


def _layers_first(experts: jax.Array | None) -> jax.Array | None:
    """[B, T, L, k] as [L, B, T, k]."""
    return None if experts is None else jnp.moveaxis(experts, 2, 0)


def _with_parts(model: Tree, **parts: Tree) -> Tree:
    """The same arrays, with other ones in these attributes."""
    new = jax.tree.map(lambda leaf: leaf, model)
    for name, part in parts.items():
        setattr(new, name, part)
    return new


def _masked(part: Tree) -> Tree:
    return jax.tree.map(lambda _: optax.MaskedNode(), part)


def with_matmul_dtype(model: Tree, dtype: str) -> Tree:
    """The same arrays, whose linear layers have products of this dtype; "auto" is that of x."""
    if dtype == "auto":
        return model
    return _with_field(model, (Linear,), "matmul_dtype", dtype)


def with_mlp_chunk(model: Tree, chunk: int) -> Tree:
    """The same arrays, whose MLPs are computed for so many tokens of a device at one time."""
    return _with_field(model, (MLP, MoE), "chunk", chunk) if chunk else model


def _with_field(model: Tree, kinds: tuple[type, ...], name: str, value: Any) -> Tree:
    """The same arrays, whose modules of these kinds have this value of a static field."""

    def changed(node: object) -> object:
        if not isinstance(node, kinds):
            return node
        new = jax.tree.map(lambda leaf: leaf, node)
        setattr(new, name, value)
        return new

    return jax.tree.map(changed, model, is_leaf=lambda node: isinstance(node, kinds))
