"""Reads several adapters in PEFT's format onto one base model, for an engine that mixes them."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from jaxrl.models.config import LoRA
from jaxrl.models.decoder import Decoder, decoder_specs
from jaxrl.models.files.adapter import open_adapter
from jaxrl.models.files.hf_save import StoredAdapter
from jaxrl.models.layers.tables import TABLES
from jaxrl.models.spec import ParamSpec, hf_names, is_spec
from sharding import Rules


def stack_adapters(
    base: Decoder, folders: Sequence[Path], *, rules: Rules, dtype: DTypeLike
) -> Decoder:
    """The base model with the adapters of all folders, of which every token uses its own.

    The base is shared. Ranks are padded with zeros to the largest, and so are layers that only some
    of the adapters change. The scale of an adapter is multiplied into its B. Raises ValueError for
    a folder that has no adapter of this model.
    """
    stored = [open_adapter(folder, base.cfg) for folder in folders]
    if dora := [str(f) for f, one in zip(folders, stored, strict=True) if one.lora.dora]:
        raise ValueError(
            f"the adapter in {dora[0]} is a DoRA adapter, which is not served next to others; "
            "merge it with python -m jaxrl.convert BASE TARGET --adapter=FOLDER and serve TARGET"
        )
    for parts, what in (((".experts.",), "experts"), (TABLES.values(), "embeddings or the head")):
        for folder, one in zip(folders, stored, strict=True):
            if any(part in name for name in one.tensors for part in parts):
                raise ValueError(
                    f"the adapter in {folder} changes {what}, which is not served next to others; "
                    "merge it with python -m jaxrl.convert BASE TARGET --adapter=FOLDER and serve "
                    "TARGET"
                )
    rank = max(one.lora.rank for one in stored)
    targets = tuple(sorted({target for one in stored for target in one.lora.targets}))
    lora = LoRA(rank, alpha=float(rank), targets=targets, n_stacked=len(stored))
    leaves, mesh = dict(jax.tree_util.tree_leaves_with_path(base)), jax.sharding.get_mesh()

    def leaf(path, spec: ParamSpec) -> jax.Array:
        if path in leaves:
            return leaves[path]
        values = stacked_values(spec, stored, rank).astype(dtype)
        return jax.device_put(values, NamedSharding(mesh, rules.spec(*spec.axes)))

    specs = decoder_specs(dataclasses.replace(base.cfg, lora=lora))
    return jax.tree.map_with_path(leaf, specs, is_leaf=is_spec)


def stacked_values(spec: ParamSpec, stored: Sequence[StoredAdapter], rank: int) -> np.ndarray:
    """float32 A or B of all adapters next to each other along the rank, in the shape of `spec`."""
    n_lead, is_a = len(spec.stacked_shape), spec.hf.endswith("lora_A.weight")
    values = np.zeros((*spec.stacked_shape, *spec.hf_shape), np.float32)
    for index, name in zip(np.ndindex(spec.stacked_shape), hf_names(spec), strict=True):
        for i, one in enumerate(stored):
            if name in one.tensors:
                own = one.tensors[name].read().astype(np.float32)
                ranks = slice(i * rank, i * rank + one.lora.rank)
                if is_a:
                    values[index][ranks] = own
                else:
                    values[index][:, ranks] = one.lora.scale * own
    return values.reshape(*spec.stacked_shape, *spec.shape[n_lead:])
