"""Loading a Hugging Face folder: each tensor goes from the file directly to its devices."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from jaxrl.models.config import DecoderConfig
from jaxrl.models.decoder import Decoder, decoder_specs, restrict
from jaxrl.models.files.hf_config import folder_config
from jaxrl.models.files.safetensors import TensorInfo, map_tensor
from jaxrl.models.files.source import resolve_model
from jaxrl.models.files.tensor_shapes import SCORE, check_shapes, expected_shapes
from jaxrl.models.files.weight_files import find_tensors
from jaxrl.models.layers.stored import Stored, shard_stored
from jaxrl.models.mesh_check import check_mesh
from jaxrl.models.quantize import matrix_inputs, quantize_matrix
from jaxrl.models.spec import ParamSpec, hf_names, init_params, map_specs
from sharding import Rules


def model_config(path: str | Path) -> DecoderConfig:
    """The decoder of a checkpoint, with logits and layers as a list. No weights are read."""
    return folder_config(resolve_model(path))


def load_model(
    path: str | Path,
    *,
    rules: Rules,
    dtype: DTypeLike = jnp.float32,
    heads: tuple[str, ...] = ("vocab",),
    stacked: bool = False,
    grouped_matmul: str = "auto",
    gated_delta: str = "auto",
    base_dtype: str = "",
    on_progress: Callable[[int, int], None] | None = None,
) -> tuple[DecoderConfig, Decoder]:
    """The checkpoint at `path` (anything `resolve_model` accepts) on the current mesh.

    Each device's slice is read, cast and transferred separately, so host memory holds about one
    tensor more than the host's own share. `heads`, `stacked`, `grouped_matmul`, `gated_delta` and
    `base_dtype` are config fields that files do not store. With a `base_dtype`, each matrix of the
    layers is quantized as soon as it is on the devices. A language model may be loaded with a
    "score" head, which is then zero; a sequence classifier with one label has no logits.
    `on_progress` receives (bytes read, total bytes).

    Raises ValueError, listing the names, for missing, unexpected or misshaped tensors.
    """
    folder = resolve_model(path)
    cfg = dataclasses.replace(
        folder_config(folder),
        heads=heads,
        stacked=stacked,
        grouped_matmul=grouped_matmul,
        gated_delta=gated_delta,
    )
    stored_cfg = dataclasses.replace(cfg, base_dtype=base_dtype)
    specs, tensors, mesh = decoder_specs(cfg), find_tensors(folder), jax.sharding.get_mesh()
    check_mesh(stored_cfg, mesh.shape, rules)
    shapes = {name: info.shape for name, info in tensors.items()}
    check_shapes(specs, shapes, f"the tensors in {folder} do not match its config.json")
    total = sum(tensors[name].n_bytes for name in expected_shapes(specs) if name in tensors)
    quantized = matrix_inputs(specs) if base_dtype else {}
    done = 0

    def load(spec: ParamSpec) -> Stored:
        nonlocal done
        if spec.hf == SCORE and SCORE not in tensors:
            return init_params(jax.random.key(0), spec, rules, dtype)
        infos = [tensors[name] for name in hf_names(spec)]
        n_in = quantized.get(spec.hf)
        # Blocks of nf4 may span several shards of FSDP.
        axes = rules.gathered(*spec.axes) if n_in else rules.spec(*spec.axes)
        leaf = read_param(spec, infos, NamedSharding(mesh, axes), spec.dtype or dtype)
        if n_in:
            leaf = quantize_matrix(leaf, n_in, base_dtype, dtype)
            leaf = shard_stored(leaf, rules, spec.axes, n_in)
        done += sum(info.n_bytes for info in infos)
        if on_progress is not None:
            on_progress(done, total)
        return leaf

    model = map_specs(load, specs)
    return stored_cfg, restrict(model, stored_cfg) if base_dtype else model


def load_params(folder: Path, rules: Rules, decoder: DecoderConfig, dtype: DTypeLike) -> Decoder:
    """`load_model` with the fields that files do not store taken from `decoder`."""
    return load_model(
        folder,
        rules=rules,
        dtype=dtype,
        heads=decoder.heads,
        stacked=decoder.stacked,
        grouped_matmul=decoder.grouped_matmul,
        gated_delta=decoder.gated_delta,
        base_dtype=decoder.base_dtype,
    )[1]


def read_param(
    spec: ParamSpec, infos: list[TensorInfo], sharding: NamedSharding, dtype: DTypeLike
) -> jax.Array:
    """One parameter in its sharding; stacked ones read a tensor per layer (and expert)."""
    tensor_indices = np.arange(len(infos)).reshape(spec.stacked_shape)
    n_lead = tensor_indices.ndim
    slices: dict[Any, np.ndarray] = {}  # devices that hold the same slice share the read

    def read_tensor(info: TensorInfo) -> np.ndarray:
        return spec.from_file(map_tensor(info))

    def read(index: tuple[slice, ...]) -> np.ndarray:
        if not n_lead:
            return np.array(read_tensor(infos[0])[index], dtype)
        here, rest = tensor_indices[index[:n_lead]], index[n_lead:]
        out = np.empty((*here.shape, *read_tensor(infos[0])[rest].shape), dtype)
        for i in np.ndindex(here.shape):
            out[i] = read_tensor(infos[here[i]])[rest]
        return out

    def device_slice(index: Any) -> np.ndarray:
        bounds = tuple((s.start, s.stop) for s in index)
        if bounds not in slices:
            slices[bounds] = read(index)
        return slices[bounds]

    return jax.make_array_from_callback(spec.shape, sharding, device_slice)
