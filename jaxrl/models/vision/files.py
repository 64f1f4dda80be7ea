"""Vision towers in Hugging Face folders: reading, and their tensors for an export."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from jaxrl.models.config import DecoderConfig
from jaxrl.models.decoder import Decoder
from jaxrl.models.files.hf_load import load_params, read_param
from jaxrl.models.files.hf_save import merge_tensors, named_tensors
from jaxrl.models.files.quantized.tensors import FileTensor, QuantizedTensor
from jaxrl.models.files.safetensors import FLOATS, Tensor
from jaxrl.models.files.tensor_shapes import mismatches
from jaxrl.models.files.weight_files import add_once, all_tensors
from jaxrl.models.spec import hf_names, is_spec, map_specs
from jaxrl.models.vision.config import TowerConfig
from jaxrl.models.vision.names import common_name, is_of_tower
from jaxrl.models.vision.tower import Tower, tower_specs
from jaxrl.models.vision.towers import folder_tower, known_tower
from sharding import Rules

# Parameters of the head of SigLIP, whose output no model reads.
UNUSED = ("vision_tower.head.",)


def load_tower(
    folder: Path, *, rules: Rules, dtype: DTypeLike = jnp.float32
) -> tuple[TowerConfig, Tower]:
    """The tower of a model folder on the current mesh, each tensor directly on its devices.

    Raises ValueError, listing the names, for missing, unexpected or misshaped tensors, and for a
    model without a tower.
    """
    cfg = known_tower(folder)
    specs, tensors, mesh = tower_specs(cfg), tower_files(folder), jax.sharding.get_mesh()
    expected = {n: s.hf_shape for s in jax.tree.leaves(specs, is_leaf=is_spec) for n in hf_names(s)}
    found = {name: tensors[common_name(name)] for name in expected if common_name(name) in tensors}
    shapes = {name: info.shape for name, info in found.items()}
    known = set(map(common_name, expected))
    shapes |= {name: info.shape for name, info in tensors.items() if name not in known}
    if lines := mismatches(expected, shapes):
        raise ValueError(
            f"the tower's tensors in {folder} do not match its vision_config ({cfg.family}):\n"
            f"{lines}\nuse the configuration that belongs to these weights"
        )

    def load(spec) -> jax.Array:
        sharding = NamedSharding(mesh, rules.spec(*spec.axes))
        return read_param(spec, [found[name] for name in hf_names(spec)], sharding, dtype)

    return cfg, map_specs(load, specs)


def load_whole(folder: Path, rules: Rules, decoder: DecoderConfig, dtype: DTypeLike) -> Decoder:
    """`load_params`, with the tower of the folder if it is a part of the decoder."""
    model = load_params(folder, rules, decoder, dtype)
    return model if decoder.tower is None else add_tower(model, folder, rules, decoder, dtype)


def add_tower(
    model: Decoder, folder: Path, rules: Rules, decoder: DecoderConfig, dtype: DTypeLike
) -> Decoder:
    """The model with the tower of the folder, which is a part of the decoder; arrays are shared."""
    assert decoder.tower is not None, "the decoder has a tower"
    tower = load_tower(folder, rules=rules, dtype=dtype)[1]
    tower.cfg, new = decoder.tower, jax.tree.map(lambda leaf: leaf, model)
    new.tower, new.cfg = nnx.data(tower), dataclasses.replace(model.cfg, tower=decoder.tower)
    return new


def tower_files(folder: Path) -> dict[str, FileTensor]:
    """The tensors of a tower and its projector in a folder's files, by `common_name`."""
    tensors: dict[str, FileTensor] = {}
    for stored, info in all_tensors(folder):
        name = common_name(stored)
        if not is_of_tower(name) or name.startswith(UNUSED):
            continue
        if isinstance(info, QuantizedTensor) or info.dtype not in FLOATS:
            raise ValueError(
                f"{info.path} stores {stored} as {info.dtype}; a vision tower that is quantized is "
                "not supported: use a checkpoint whose tower is not"
            )
        add_once(tensors, name, info)
    return tensors


def same_tower(folder: Path, other: Path) -> bool:
    """Whether two model folders have one tower: equal configs and equal bytes of all tensors."""
    cfg = folder_tower(folder)
    if cfg is None or cfg != folder_tower(other):
        return False
    ours, theirs = tower_files(folder), tower_files(other)
    return ours.keys() == theirs.keys() and all(
        _content(info) == _content(theirs[name]) for name, info in ours.items()
    )


def _content(info: FileTensor) -> tuple[np.dtype, tuple[int, ...], bytes]:
    with info.path.open("rb") as file:
        file.seek(info.start)
        return info.dtype, tuple(info.shape), file.read(info.n_bytes)


def tower_tensors(tower: Tower, dtype: DTypeLike | None = None) -> Iterator[Tensor]:
    """The tower's parameters under their names in files; adapters are merged into their weights.

    `dtype` None keeps the parameters' dtypes.
    """
    tensors = {tensor.name: tensor for tensor in named_tensors(tower_specs(tower.cfg), tower)}
    return merge_tensors(tensors, tower.cfg.lora, None if dtype is None else np.dtype(dtype))
