"""Reads several adapters in PEFT's format onto one base model, for an engine that mixes them."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from jaxrl.models.adapter_stack import with_gains
from jaxrl.models.config import DecoderConfig, LoRA
from jaxrl.models.decoder import Decoder, decoder_specs
from jaxrl.models.files.adapter import open_adapter, warn_of_unused_head, with_adapted_tower
from jaxrl.models.files.hf_save import StoredAdapter
from jaxrl.models.lora import without_adapters
from jaxrl.models.spec import ParamSpec, hf_names, is_spec
from jaxrl.models.vision.names import is_of_tower
from sharding import Rules

A_PARTS = ("lora_A.weight", "lora_embedding_A")
B_PARTS = ("lora_B.weight", "lora_embedding_B")


def stack_adapters(
    base: Decoder,
    folders: Sequence[Path],
    *,
    rules: Rules,
    dtype: DTypeLike,
    source: Path | None = None,
) -> Decoder:
    """The base model with the adapters of all folders, of which every token uses its own.

    The base is shared. Ranks are padded with zeros to the largest, and so are layers that only some
    of the adapters change. The scale of an adapter is multiplied into its B. Adapters may also
    change the vision tower of the model in `source`, which is not a part of the base here
    (adapted_tower.py). Raises ValueError for a folder that has no adapter of this model.
    """
    stored = [open_adapter(folder, _with_tower(folder, base.cfg, source)) for folder in folders]
    for folder, one in zip(folders, stored, strict=True):
        warn_of_unused_head(folder, one.tensors, base.cfg)
    rank = max(one.lora.rank for one in stored)
    every = {target for one in stored for target in one.lora.targets}
    targets = tuple(sorted(target for target in every if not is_of_tower(target)))
    dora = any(one.lora.dora for one in stored)
    lora = LoRA(rank, alpha=float(rank), dora=dora, targets=targets, n_stacked=len(stored))
    model = _with_stored(base, lora, stored, rules, dtype)
    for i, one in enumerate(stored, start=1):
        if one.lora.dora:
            own = dataclasses.replace(one.lora, alpha=float(one.lora.rank), rslora=False)
            model = with_gains(model, i, _with_stored(base, own, [one], rules, dtype), rules)
    return model


def _with_tower(folder: Path, decoder: DecoderConfig, source: Path | None) -> DecoderConfig:
    return decoder if source is None else with_adapted_tower(folder, decoder, source)


def put_adapter(
    model: Decoder,
    index: int,
    folder: Path,
    *,
    rules: Rules,
    dtype: DTypeLike,
    source: Path | None = None,
) -> Decoder:
    """The model whose stack has the adapter of `folder` in the place `index`, from 1.

    All other arrays and places stay. `source` is as in `stack_adapters`. Raises ValueError for an
    adapter of another model, of a larger rank, of layers that the stack does not have, or with
    magnitudes.
    """
    base, lora = without_adapters(model), model.cfg.lora
    assert lora is not None and 0 < index <= lora.n_stacked
    stored = open_adapter(folder, _with_tower(folder, base.cfg, source))
    own = {target for target in stored.lora.targets if not is_of_tower(target)}
    others = own - set(lora.targets)
    if stored.lora.rank > lora.rank or others or stored.lora.dora:
        raise ValueError(
            f"the adapter in {folder} has the rank {stored.lora.rank} and the layers "
            f"{', '.join(stored.lora.targets)}; the engine has room for the rank {lora.rank} and "
            f"{', '.join(lora.targets)}, without magnitudes"
        )
    single = dataclasses.replace(lora, n_stacked=1)
    one = _with_stored(base, single, [stored], rules, dtype)

    def put(stack: jax.Array, own: jax.Array) -> jax.Array:
        differ = [i for i, (n, m) in enumerate(zip(stack.shape, own.shape, strict=True)) if n != m]
        if not differ:  # of the base, or of a stack of one
            return own
        [axis] = differ
        return jax.lax.dynamic_update_slice_in_dim(stack, own, (index - 1) * lora.rank, axis)

    return jax.tree.unflatten(
        jax.tree.structure(model), map(put, jax.tree.leaves(model), jax.tree.leaves(one))
    )


def _with_stored(
    base: Decoder, lora: LoRA, stored: Sequence[StoredAdapter], rules: Rules, dtype: DTypeLike
) -> Decoder:
    """The base with the stored adapters as its `lora`, whose scale is 1."""
    leaves, mesh = dict(jax.tree_util.tree_leaves_with_path(base)), jax.sharding.get_mesh()

    def leaf(path, spec: ParamSpec) -> jax.Array:
        if path in leaves:
            return leaves[path]
        values = stacked_values(spec, stored, lora.rank).astype(spec.dtype or dtype)
        return jax.device_put(values, NamedSharding(mesh, rules.spec(*spec.axes)))

    specs = decoder_specs(dataclasses.replace(base.cfg, lora=lora))
    return jax.tree.map_with_path(leaf, specs, is_leaf=is_spec)


def stacked_values(spec: ParamSpec, stored: Sequence[StoredAdapter], rank: int) -> np.ndarray:
    """float32 A or B of all adapters next to each other along the rank, in the shape of `spec`.

    For other parts, the only adapter's magnitude, or ones as the gains that no adapter has yet.
    """
    start = float(not spec.hf.endswith((*A_PARTS, *B_PARTS)))
    values = np.full((*spec.stacked_shape, *spec.hf_shape), start, np.float32)
    for index, name in zip(np.ndindex(spec.stacked_shape), hf_names(spec), strict=True):
        for i, one in enumerate(stored):
            if name not in one.tensors:
                continue
            own = one.tensors[name].read().astype(np.float32)
            ranks = slice(i * rank, i * rank + one.lora.rank)
            if name.endswith(A_PARTS):
                values[index][ranks] = own
            elif name.endswith(B_PARTS):
                values[index][:, ranks] = one.lora.scale * own
            else:
                values[index] = own
        values[index] = values[index][spec.file_rows]
    return values.reshape(*spec.stacked_shape, *spec.shape[len(spec.stacked_shape) :])
