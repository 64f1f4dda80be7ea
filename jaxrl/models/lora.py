"""Adapters of a model: which layers have them, and the arrays that training changes.

A model with adapters is one tree of the base weights and the adapters' A and B
(https://arxiv.org/abs/2106.09685). Training changes the adapters, and the value or reward head of
a model that has one; the base weights stay as they are, in the same arrays.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Collection
from difflib import get_close_matches
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.typing import DTypeLike

from jaxrl.config.keys import LoRAConfig
from jaxrl.models.adapter_init import adapted_weights, with_magnitudes, with_start
from jaxrl.models.config import DecoderConfig, LoRA, target_name
from jaxrl.models.decoder import Decoder, decoder_specs, restrict
from jaxrl.models.layers.linear import Adapter, Linear
from jaxrl.models.layers.mlp import SHARED_GATE
from jaxrl.models.layers.moe import MoE
from jaxrl.models.layers.tables import TABLES, EmbeddingAdapter
from jaxrl.models.quantize import matrix_inputs
from jaxrl.models.spec import ParamSpec, init_params
from jaxrl.models.vision import adapters as vision
from jaxrl.models.vision.names import common_name, is_of_tower
from jaxrl.types import Tree
from sharding import Rules

ALL_LINEAR = "all-linear"
STATISTICS = ("std_bias", "std_scale", "limits")  # of a vision tower
LAYER_PREFIX = re.compile(r"^model\.layers\.\d+\.")


def adapters(cfg: LoRAConfig, decoder: DecoderConfig) -> LoRA | None:
    """The adapters that the config asks for; None if it asks for none.

    Raises ValueError for names that match no linear layer and for a rank above that of a layer.
    """
    if not cfg.rank:
        return None
    sizes = linear_layers(decoder) | tower_layers(decoder)
    chosen = matching(cfg.target_modules, sizes, "config.lora.target_modules")
    excluded = matching(cfg.exclude_modules, sizes, "config.lora.exclude_modules")
    names = [name for name in sizes if name in chosen and name not in excluded]
    if not names:
        raise ValueError(
            f"config.lora.exclude_modules={cfg.exclude_modules} leaves no layer of "
            f"config.lora.target_modules={cfg.target_modules}; exclude fewer"
        )
    if decoder.tower is not None and not any(map(is_of_tower, names)):
        part = "projector" if decoder.tower.frozen else "vision tower and the projector"
        raise ValueError(
            f"config.model.freeze_vision trains the {part} through adapters if there are some, and "
            f"config.lora.target_modules={cfg.target_modules} chooses none of its layers: add some "
            f"of {', '.join(tower_layers(decoder))}, or set config.model.freeze_vision='all'"
        )
    check_rank(cfg, {name: sizes[name] for name in names})
    targets = tuple(dict.fromkeys(map(adapter_name, names)))
    check_shared_names(names, sizes)
    pissa = cfg.init == "pissa"
    return LoRA(cfg.rank, cfg.alpha, cfg.rslora, cfg.dora, targets, pissa=pissa)


def adapter_name(name: str) -> str:
    """The name by which adapters choose a layer of `adapters`: of a vision tower the whole one."""
    return name if is_of_tower(name) else target_name(name)


def tower_layers(decoder: DecoderConfig) -> dict[str, tuple[int, int]]:
    """(out, in) of the linear layers of the vision tower, if it is trained, and its projector."""
    return {} if decoder.tower is None else vision.linear_layers(decoder.tower)


def check_rank(cfg: LoRAConfig, sizes: dict[str, tuple[int, int]]) -> None:
    """Raises ValueError for a rank above that of a layer, by its (out, in)."""
    # Adapters of one output may have any rank, as in PEFT, if they start at random values.
    pissa = cfg.init == "pissa"
    limits = {name: min(size) for name, size in sizes.items() if pissa or min(size) > 1}
    smallest = min(limits, key=limits.__getitem__, default="")
    if cfg.rank > limits.get(smallest, cfg.rank):
        out, into = sizes[smallest]
        raise ValueError(
            f"config.lora.rank={cfg.rank} is above the rank of {smallest} [{out}, {into}]; set at "
            f"most {min(out, into)}, or exclude this layer"
        )


def check_shared_names(chosen: Collection[str], every: Collection[str]) -> None:
    """Raises ValueError for a chosen layer whose name in adapter files another layer has too.

    These are dense layers and experts in one model.
    """
    of_chosen = {adapter_name(name): name for name in chosen}
    for name in every:
        if name not in chosen and (other := of_chosen.get(adapter_name(name))):
            raise ValueError(
                f"{other} and {name} are both {adapter_name(name)} in adapter files; set "
                "config.lora.target_modules to both, or exclude both by config.lora.exclude_modules"
            )


def with_adapters(cfg: LoRAConfig, decoder: DecoderConfig) -> DecoderConfig:
    """The decoder with the adapters and the storage of the base that the config asks for."""
    base_dtype = "" if cfg.base_dtype == "auto" else cfg.base_dtype
    return dataclasses.replace(decoder, lora=adapters(cfg, decoder), base_dtype=base_dtype)


def linear_layers(decoder: DecoderConfig) -> dict[str, tuple[int, int]]:
    """(out, in) of the linear layers of transformer layers, by name: "self_attn.q_proj", ...

    Of layers in which one has different sizes, the smallest.

    Those of the experts of a mixture of experts are "mlp.experts.up_proj" and so on. The embedding
    table and the unembedding are "embed_tokens" and "lm_head".
    """
    plain = dataclasses.replace(decoder, lora=None, base_dtype="", stacked=False, tower=None)
    kinds = {layer.kind: layer for layer in decoder.layers}
    few = decoder_specs(dataclasses.replace(plain, layers=tuple(kinds.values())))
    shapes = {spec.hf: spec.hf_shape for spec in jax.tree.leaves(few)}
    found: dict[str, tuple[int, int]] = {}
    for hf in matrix_inputs(few):
        name = LAYER_PREFIX.sub("", hf).removesuffix(".weight").replace(".{expert}", "")
        found[name] = min(found.get(name, shapes[hf]), shapes[hf], key=min)
    tables = [name for name in TABLES.values() if name != "lm_head" or "vocab" in decoder.heads]
    return found | dict.fromkeys(tables, (decoder.V, decoder.D))


def is_optional(name: str) -> bool:
    """Whether a name of `linear_layers` is not part of all-linear.

    These are experts, tables, the gate of a shared expert, which has one output, and the layers of
    a vision tower.
    """
    experts = "experts" in name.split(".")
    optional = experts or name.endswith(SHARED_GATE) or name in TABLES.values()
    return optional or is_of_tower(name)


def matching(patterns: tuple[str, ...], names: dict[str, tuple[int, int]], key: str) -> set[str]:
    """The names that at least one of the patterns matches.

    Raises ValueError, with near names, for a pattern that matches none.
    """
    found: set[str] = set()
    for pattern in patterns:
        if pattern == ALL_LINEAR:
            found |= {name for name in names if not is_optional(name)}
            continue
        try:
            hits = {n for n in names for form in name_forms(n) if re.fullmatch(pattern, form)}
        except re.error as error:
            raise ValueError(f"{key}: {pattern!r} is no regular expression: {error}") from error
        if not hits:
            short = [name.rpartition(".")[2] for name in names]
            near = get_close_matches(pattern, short, n=2)
            hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
            raise ValueError(
                f"{key}: {pattern!r} matches no linear layer of this model; {hint}set "
                f"{ALL_LINEAR!r} or some of {', '.join(names)}"
            )
        found |= hits
    return found


def name_forms(name: str) -> tuple[str, ...]:
    """The names by which a pattern may match a layer; of a vision tower only whole ones."""
    if is_of_tower(name):
        return name, name.removeprefix("model.")
    return name, name.rpartition(".")[2], target_name(name), whole_form(name)


def whole_form(name: str) -> str:
    """A name of `linear_layers` in an image-and-text model, without the number of the layer."""
    if name in TABLES.values():
        return name if name == "lm_head" else f"model.language_model.{name}"
    return f"model.language_model.layers.{name}"


def frozen_tensors(others: Collection[str], decoder: DecoderConfig) -> list[str]:
    """Those of the tensors next to a language model whose layers can have no adapters."""
    specs = decoder.tower and decoder_specs(decoder).tower
    if specs is None:
        return list(others)
    trained = specs if not decoder.tower.frozen else (specs.merger, specs.deepstack)
    names = {common_name(spec.hf) for spec in jax.tree.leaves(trained)}
    return [name for name in others if common_name(name) not in names]


def check_frozen_parts(patterns: Collection[str], tensors: Collection[str]) -> None:
    """Raises ValueError for a pattern of target modules that matches a layer of a frozen part.

    `tensors` are those of a model next to its language model: the vision tower, the projector.
    """
    layers = sorted(name.removesuffix(".weight") for name in tensors if name.endswith(".weight"))
    for pattern in patterns:
        try:
            found = re.compile(pattern)
        except re.error:  # `matching` reports it
            continue
        for name in layers:
            if found.fullmatch(name) or found.fullmatch(name.removeprefix("model.")):
                raise ValueError(
                    f"config.lora.target_modules: {pattern!r} matches {name}, which is not a layer "
                    "of the language model and is frozen; name layers of the language model only, "
                    "such as 'q_proj' or 'self_attn.*', or set 'all-linear'. "
                    "config.model.freeze_vision='none' also trains adapters of the vision tower "
                    "and its projector, 'tower' of the projector only"
                )


def add_adapters(
    base: Decoder, lora: LoRA, *, seed: int, rules: Rules, dtype: DTypeLike
) -> Decoder:
    """The model with new adapters, whose B is zero: it computes the same. The base is shared.

    A magnitude (DoRA) is the norm of its weights. With `lora.pissa`, A and B start at the principal
    part of the weights, which their start takes off again.
    """
    specs = decoder_specs(dataclasses.replace(base.cfg, lora=lora))
    return with_new_parts(base, specs, lora, seed=seed, rules=rules, dtype=dtype)


def with_new_parts(
    base: Tree, specs: Tree, lora: LoRA, *, seed: int, rules: Rules, dtype: DTypeLike
) -> Tree:
    """`add_adapters` for a model with the specs that it has with adapters."""
    key, leaves = jax.random.key(seed), dict(jax.tree_util.tree_leaves_with_path(base))

    def leaf(path, spec: ParamSpec) -> jax.Array:
        return leaves[path] if path in leaves else init_params(key, spec, rules, dtype)

    model = jax.tree.map_with_path(leaf, specs)
    if lora.pissa:
        model = with_start(model, rules)
    return with_magnitudes(model, rules) if lora.dora else model


def without_adapters(model: Decoder) -> Decoder:
    """The base model: the same arrays without the adapters."""
    return restrict(model, dataclasses.replace(model.cfg, lora=None))


def silenced(model: Decoder) -> Decoder:
    """The base model in the form with adapters, whose arrays are zeros: programs accept both.

    All other arrays are shared. Not for DoRA, whose magnitudes scale the weights.
    """
    trained, frozen = split(model)
    return combine(jax.tree.map(jnp.zeros_like, trained), frozen)


def merge(model: Tree) -> Tree:
    """The base model, whose layers with adapters have the weights W + scale B A.

    With a magnitude m (DoRA), the weights of each output are scaled to the norm m. Computed in
    float32 in the sharding of W: the rank is not sharded, so only norms need communication. All
    other arrays are shared. `model` may also be one layer.
    """
    return replace_weights(
        lambda w, change: merged_weight(
            w, *change.factors(), change.m, scale=change.scale, n_out=change.n_out
        ),
        model,
    )


def replace_weights(fn: Callable[[Any, Adapter | EmbeddingAdapter], Any], model: Tree) -> Tree:
    """The base model with fn(w, adapter) in place of every weight w that has an adapter.

    Leaves may be arrays or any stand-in. `model` may also be one layer.
    """

    def base_layer(module: Any) -> Any:
        if not isinstance(module, Linear | MoE) or not (found := adapted_weights(module)):
            return module
        new = jax.tree.map(lambda leaf: leaf, module)
        for name, adapter in found.items():
            setattr(new, name, nnx.data(fn(getattr(module, name), adapter)))
        new.lora = nnx.data(dict.fromkeys(module.lora) if isinstance(module, MoE) else None)
        return new

    new = jax.tree.map(base_layer, model, is_leaf=lambda node: isinstance(node, Linear | MoE))
    if isinstance(new, Decoder):
        for name, adapter in new.lora.items():
            if adapter is not None:
                setattr(new, name, nnx.data(fn(getattr(new, name), adapter)))
        new.lora = nnx.data(dict.fromkeys(new.lora))
        new.cfg = dataclasses.replace(new.cfg, lora=None)
        if new.tower is not None:
            new.tower.cfg = dataclasses.replace(new.tower.cfg, lora=None)
    return new


@functools.partial(jax.jit, static_argnames=("scale", "n_out"))
def merged_weight(
    w: jax.Array, a: jax.Array, b: jax.Array, m: jax.Array | None, *, scale: float, n_out: int
) -> jax.Array:
    """w [*out, *in] + scale b [*out, rank] a [rank, *in], with the norms m [*out] if there are any.

    All may have leading layers and experts.
    """
    n_lead = b.ndim - n_out - 1
    lead, out, into = "lm"[:n_lead], "ijk"[:n_out], "xyz"[: w.ndim - n_out - n_lead]
    change = jnp.einsum(
        f"{lead}{out}r,{lead}r{into}->{lead}{out}{into}",
        b.astype(jnp.float32),
        a.astype(jnp.float32),
        out_sharding=jax.typeof(w).sharding.spec,
    )
    merged = w.astype(jnp.float32) + scale * change
    if m is not None:
        inputs = tuple(range(n_lead + n_out, w.ndim))
        norm = jnp.sqrt(jnp.sum(jnp.square(merged), axis=inputs))
        gain = m.astype(jnp.float32) / jax.reshard(norm, jax.typeof(m).sharding.spec)
        merged = merged * jnp.expand_dims(gain, inputs)
    return merged.astype(w.dtype)


def split(model: Decoder) -> tuple[Tree, Tree]:
    """(arrays that training changes, frozen arrays); each has MaskedNode in place of the others.

    Without adapters all arrays are trained, except the corrections of routers, which have no
    gradient, the scalars of layers and the statistics of towers, which are no parameters, and a
    frozen tower below a projector. `model` may also be a tree of specs.
    """
    trained = _is_trained(model)
    return _select(model, trained), _select(model, jax.tree.map(lambda t: not t, trained))


def combine(trained: Tree, frozen: Tree) -> Tree:
    """The model of which `split` made these two."""
    return jax.tree.map(
        lambda a, b: b if isinstance(a, optax.MaskedNode) else a,
        trained,
        frozen,
        is_leaf=lambda node: isinstance(node, optax.MaskedNode),
    )


def checkpoint_part(model: Decoder) -> Tree:
    """The arrays that a checkpoint keeps: trained ones and the starts of adapters.

    The others, MaskedNodes here, are in the folder of the base model.
    """
    if model.cfg.lora is None:
        return model
    return _select(model, _in_parts(model, "lora", "score"))


def with_base(saved: Tree, base: Decoder) -> Decoder:
    """The model of the arrays of `checkpoint_part`; the others are those of the base model."""
    leaves = dict(jax.tree_util.tree_leaves_with_path(base))

    def leaf(path, array):
        return leaves[path] if isinstance(array, optax.MaskedNode) else array

    return jax.tree.map_with_path(
        leaf, saved, is_leaf=lambda node: isinstance(node, optax.MaskedNode)
    )


def _is_trained(model: Decoder) -> Tree:
    """A tree of bools."""
    fixed = _in_parts(model, "a0", "b0", "correction", "scalar", *STATISTICS)
    if model.cfg.tower is not None and model.cfg.tower.frozen:
        tower, projector = (_in_parts(model, *p) for p in (("tower",), ("merger", "deepstack")))
        fixed = jax.tree.map(lambda f, t, p: f or (t and not p), fixed, tower, projector)
    if model.cfg.lora is None:
        return jax.tree.map(lambda fixed: not fixed, fixed)
    chosen = _in_parts(model, "lora", "score")
    return jax.tree.map(lambda chosen, fixed: chosen and not fixed, chosen, fixed)


def _in_parts(model: Decoder, *parts: str) -> Tree:
    """A tree of bools: whether an array is in a part of one of these names."""

    def is_part(path, _) -> bool:
        names = {getattr(key, "name", getattr(key, "key", None)) for key in path}
        return not names.isdisjoint(parts)

    return jax.tree.map_with_path(is_part, model)


def _select(model: Tree, chosen: Tree) -> Tree:
    return jax.tree.map(lambda c, leaf: leaf if c else optax.MaskedNode(), chosen, model)
