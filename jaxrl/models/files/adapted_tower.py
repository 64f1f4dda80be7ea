"""The vision tower of a model with an adapter of PEFT merged into it."""

import dataclasses
from pathlib import Path

import jax
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from jaxrl.models.config import DecoderConfig
from jaxrl.models.files.adapter import open_adapter, with_adapted_tower
from jaxrl.models.lora import merge
from jaxrl.models.spec import ParamSpec, is_spec
from jaxrl.models.vision.files import load_tower
from jaxrl.models.vision.tower import Tower, tower_specs
from sharding import Rules


def load_adapted_tower(
    adapter: Path, source: Path, decoder: DecoderConfig, *, rules: Rules, dtype: DTypeLike
) -> Tower | None:
    """The tower of the model in `source` with the adapter in a folder; None if it has no change.

    `decoder` is the language model's config. Raises ValueError for an adapter of another model.
    """
    whole = with_adapted_tower(adapter, decoder, source)
    if whole.tower is None:
        return None
    stored, mesh = open_adapter(adapter, whole), jax.sharding.get_mesh()
    cfg, base = load_tower(source, rules=rules, dtype=dtype)
    leaves = dict(jax.tree_util.tree_leaves_with_path(base))

    def leaf(path, spec: ParamSpec) -> jax.Array:
        if path in leaves:
            return leaves[path]
        values = spec.from_file(stored.tensors[spec.hf].read()).astype(dtype)
        return jax.device_put(values, NamedSharding(mesh, rules.spec(*spec.axes)))

    specs = tower_specs(dataclasses.replace(cfg, lora=stored.lora))
    tower: Tower = merge(jax.tree.map_with_path(leaf, specs, is_leaf=is_spec))
    tower.cfg = cfg
    return tower
