"""One table per model: shape, logical axes, init and Hugging Face name of every parameter."""

import dataclasses
import math
import zlib

import jax
import jax.numpy as jnp

from jaxrl.types import Tree
from sharding import Rules


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """One parameter. Where layers are stacked, `shape` and `axes` carry the leading layer axis
    and `hf` holds the placeholder `{layer}`."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: str  # "normal" | "zeros" | "ones"
    hf: str  # e.g. "model.layers.0.mlp.up_proj.weight"
    hf_shape: tuple[int, ...]  # of one layer, as the file holds it


def is_spec(leaf: object) -> bool:
    return isinstance(leaf, ParamSpec)


def map_specs(fn, specs: Tree, *rest: Tree) -> Tree:
    return jax.tree.map(fn, specs, *rest, is_leaf=is_spec)


def partition_specs(specs: Tree, rules: Rules) -> Tree:
    return map_specs(lambda s: rules.spec(*s.axes), specs)


def abstract_params(specs: Tree, dtype: jnp.dtype) -> Tree:
    return map_specs(lambda s: jax.ShapeDtypeStruct(s.shape, dtype), specs)


def count_params(specs: Tree) -> int:
    return sum(math.prod(s.shape) for s in jax.tree.leaves(specs, is_leaf=is_spec))


def init_params(key: jax.Array, specs: Tree, rules: Rules, dtype: jnp.dtype) -> Tree:
    """Random parameters, each leaf created in its own sharding. Normal leaves have std 0.02."""

    def create(spec: ParamSpec) -> jax.Array:
        out = rules.spec(*spec.axes)
        if spec.init != "normal":
            fill = jnp.zeros if spec.init == "zeros" else jnp.ones
            return jax.reshard(fill(spec.shape, dtype), out)
        leaf_key = jax.random.fold_in(key, zlib.crc32(spec.hf.encode()))
        return jax.reshard(0.02 * jax.random.normal(leaf_key, spec.shape, dtype), out)

    return map_specs(create, specs)
