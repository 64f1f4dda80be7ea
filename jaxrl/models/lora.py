"""Adapters of a model: which layers have them, and the arrays that training changes.

A model with adapters is one tree of the base weights and the adapters' A and B
(https://arxiv.org/abs/2106.09685). Training changes the adapters, and the value or reward head of
a model that has one; the base weights stay as they are, in the same arrays.
"""

import dataclasses
import functools
import re
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.typing import DTypeLike

from jaxrl.config.keys import LoRAConfig
from jaxrl.models.config import DecoderConfig, LoRA
from jaxrl.models.decoder import Decoder, decoder_specs, restrict
from jaxrl.models.layers.linear import Adapter, Linear
from jaxrl.models.layers.stored import QUANTIZED, Stored, dense, gather_stored
from jaxrl.models.spec import ParamSpec, init_params, is_spec, map_specs
from jaxrl.types import Tree
from sharding import Rules

ALL_LINEAR = "all-linear"


def adapters(cfg: LoRAConfig, decoder: DecoderConfig) -> LoRA | None:
    """The adapters that the config asks for; None if it asks for none.

    Raises ValueError for names that match no linear layer and for a rank above that of a layer.
    """
    if not cfg.rank:
        return None
    sizes = linear_layers(decoder)
    chosen = matching(cfg.target_modules, sizes, "config.lora.target_modules")
    excluded = matching(cfg.exclude_modules, sizes, "config.lora.exclude_modules")
    names = [name for name in sizes if name in chosen and name not in excluded]
    if not names:
        raise ValueError(
            f"config.lora.exclude_modules={cfg.exclude_modules} leaves no layer of "
            f"config.lora.target_modules={cfg.target_modules}; exclude fewer"
        )
    smallest = min(names, key=lambda name: min(sizes[name]))
    if cfg.rank > min(sizes[smallest]):
        out, into = sizes[smallest]
        raise ValueError(
            f"config.lora.rank={cfg.rank} is above the rank of {smallest} [{out}, {into}]; set at "
            f"most {min(out, into)}, or exclude this layer"
        )
    targets = tuple(name.rpartition(".")[2] for name in names)
    return LoRA(cfg.rank, cfg.alpha, cfg.rslora, cfg.dora, targets)


def with_adapters(cfg: LoRAConfig, decoder: DecoderConfig) -> DecoderConfig:
    """The decoder with the adapters and the storage of the base that the config asks for."""
    base_dtype = "" if cfg.base_dtype == "auto" else cfg.base_dtype
    return dataclasses.replace(decoder, lora=adapters(cfg, decoder), base_dtype=base_dtype)


def linear_layers(decoder: DecoderConfig) -> dict[str, tuple[int, int]]:
    """(out, in) of the linear layers of a transformer layer, by name: "self_attn.q_proj", ..."""
    plain = dataclasses.replace(decoder, lora=None, base_dtype="")
    one = decoder_specs(dataclasses.replace(plain, L=1, windows=decoder.windows[:1]))
    linears: list[Any] = jax.tree.leaves(one, is_leaf=lambda node: isinstance(node, Linear))
    return {node.name: node.w.hf_shape for node in linears if not is_spec(node)}


def matching(patterns: tuple[str, ...], names: dict[str, tuple[int, int]], key: str) -> set[str]:
    """The names that at least one of the patterns matches.

    Raises ValueError, with near names, for a pattern that matches none.
    """
    found: set[str] = set()
    for pattern in patterns:
        if pattern == ALL_LINEAR:
            found |= set(names)
            continue
        try:
            hits = {
                n
                for n in names
                for form in (n, n.rpartition(".")[2])
                if re.fullmatch(pattern, form)
            }
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


def add_adapters(
    base: Decoder, lora: LoRA, *, seed: int, rules: Rules, dtype: DTypeLike
) -> Decoder:
    """The model with new adapters, whose B is zero: it computes the same. The base is shared.

    A magnitude (DoRA) is the norm of its weights.
    """
    key, leaves = jax.random.key(seed), dict(jax.tree_util.tree_leaves_with_path(base))
    specs = decoder_specs(dataclasses.replace(base.cfg, lora=lora))

    def leaf(path, spec: ParamSpec) -> jax.Array:
        return leaves[path] if path in leaves else init_params(key, spec, rules, dtype)

    model = jax.tree.map_with_path(leaf, specs, is_leaf=is_spec)
    return (
        map_linears(functools.partial(with_magnitude, rules=rules), model) if lora.dora else model
    )


def map_linears(fn: Callable[[Linear], Linear], model: Decoder) -> Decoder:
    """The model with fn(linear) in place of every linear layer."""
    return jax.tree.map(
        lambda node: fn(node) if isinstance(node, Linear) else node,
        model,
        is_leaf=lambda node: isinstance(node, Linear),
    )


def with_magnitude(linear: Linear, *, rules: Rules) -> Linear:
    """The layer with the norm of each output's weights as the magnitude of its adapter."""
    if linear.lora is None:
        return linear
    new, w = jax.tree.map(lambda leaf: leaf, linear), linear.w
    if isinstance(w, QUANTIZED):
        axes = ("layers",) * (len(w.shape) - len(linear.axes)) + linear.axes
        w = gather_stored(w, rules, axes, len(linear.axes) - linear.n_out)
    new.lora.m = nnx.data(_norms(w, linear.lora.m))
    return new


@jax.jit
def _norms(w: Stored, like: jax.Array) -> jax.Array:
    """The norms [*out] of w [*out, *in], with the dtype and sharding of `like`."""
    values = dense(w, jnp.float32) if isinstance(w, QUANTIZED) else w.astype(jnp.float32)
    norms = jnp.sqrt(jnp.sum(jnp.square(values), axis=tuple(range(like.ndim, values.ndim))))
    return jax.reshard(norms.astype(like.dtype), jax.typeof(like).sharding.spec)


def without_adapters(model: Decoder) -> Decoder:
    """The base model: the same arrays without the adapters."""
    return restrict(model, dataclasses.replace(model.cfg, lora=None))


def merge(model: Tree) -> Tree:
    """The base model, whose layers with adapters have the weights W + scale B A.

    With a magnitude m (DoRA), the weights of each output are scaled to the norm m. Computed in
    float32 in the sharding of W: the rank is not sharded, so only norms need communication. All
    other arrays are shared. `model` may also be one layer.
    """
    return replace_weights(
        lambda linear, change: merged_weight(
            linear.w, change.a, change.b, change.m, scale=change.scale, n_out=linear.n_out
        ),
        model,
    )


def replace_weights(fn: Callable[[Linear, Adapter], Any], model: Tree) -> Tree:
    """The base model with fn(layer, adapter) in place of the weight of every layer with adapters.

    Leaves may be arrays or any stand-in. `model` may also be one layer.
    """

    def base_layer(module: Any) -> Any:
        if not isinstance(module, Linear) or module.lora is None:
            return module
        new = jax.tree.map(lambda leaf: leaf, module)
        new.w = nnx.data(fn(module, module.lora))
        new.lora = nnx.data(None)
        return new

    new = jax.tree.map(base_layer, model, is_leaf=lambda node: isinstance(node, Linear))
    if isinstance(new, Decoder):
        new.cfg = dataclasses.replace(new.cfg, lora=None)
    return new


@functools.partial(jax.jit, static_argnames=("scale", "n_out"))
def merged_weight(
    w: jax.Array, a: jax.Array, b: jax.Array, m: jax.Array | None, *, scale: float, n_out: int
) -> jax.Array:
    """w [*out, *in] + scale b [*out, rank] a [rank, *in], with the norms m [*out] if there are any.

    All may have leading layers.
    """
    n_lead = b.ndim - n_out - 1
    lead, out, into = "l" * n_lead, "ijk"[:n_out], "xyz"[: w.ndim - n_out - n_lead]
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

    Without adapters all arrays are trained. `model` may also be a tree of specs.
    """
    trained = _is_trained(model)
    return _select(model, trained), _select(model, jax.tree.map(lambda t: not t, trained))


def combine(trained: Tree, frozen: Tree) -> Decoder:
    """The model of which `split` made these two."""
    return jax.tree.map(
        lambda a, b: b if isinstance(a, optax.MaskedNode) else a,
        trained,
        frozen,
        is_leaf=lambda node: isinstance(node, optax.MaskedNode) or is_spec(node),
    )


def with_base(trained: Tree, base: Decoder) -> Decoder:
    """The model of the trained arrays of `split`; its frozen arrays are those of the base model."""
    leaves = dict(jax.tree_util.tree_leaves_with_path(base))

    def leaf(path, array):
        return leaves[path] if isinstance(array, optax.MaskedNode) else array

    return jax.tree.map_with_path(
        leaf, trained, is_leaf=lambda node: isinstance(node, optax.MaskedNode)
    )


def _is_trained(model: Decoder) -> Tree:
    """A tree of bools."""
    if model.cfg.lora is None:
        return map_specs(lambda _: True, model)

    def is_trained(path, _) -> bool:
        names = [getattr(key, "name", getattr(key, "key", None)) for key in path]
        return "lora" in names or "score" in names

    return jax.tree.map_with_path(is_trained, model, is_leaf=is_spec)


def _select(model: Tree, chosen: Tree) -> Tree:
    return jax.tree.map(lambda c, leaf: leaf if c else optax.MaskedNode(), chosen, model)
