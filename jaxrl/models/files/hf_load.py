"""Loading a Hugging Face folder: each tensor goes from the file directly to its devices."""

import dataclasses
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from jaxrl.config.choices import ONE_LABEL
from jaxrl.json_text import read_object
from jaxrl.models.config import DecoderConfig
from jaxrl.models.decoder import Decoder, decoder_specs, restrict
from jaxrl.models.files.hf_config import ADVICE, config_path, folder_config
from jaxrl.models.files.quantized.scheme import folder_scheme
from jaxrl.models.files.quantized.tensors import FileTensor, QuantizedTensor
from jaxrl.models.files.safetensors import map_tensor
from jaxrl.models.files.source import resolve_model
from jaxrl.models.files.tensor_shapes import SCORE, check_shapes, expected_shapes
from jaxrl.models.files.weight_files import find_tensors, skipped_parts
from jaxrl.models.layers.stored import Stored, shard_stored
from jaxrl.models.mesh_check import check_mesh
from jaxrl.models.quantize import matrix_inputs, quantize_matrix
from jaxrl.models.spec import ParamSpec, hf_names, init_params, map_specs
from sharding import Rules, hosts

logger = logging.getLogger(__name__)


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
    labels: tuple[str, ...] = ONE_LABEL,
    on_progress: Callable[[int, int], None] | None = None,
) -> tuple[DecoderConfig, Decoder]:
    """The checkpoint at `path` (anything `resolve_model` accepts) on the current mesh.

    Each device's slice is read, cast and transferred separately, so host memory holds about one
    tensor more than the host's own share. `heads`, `labels`, `stacked`, `grouped_matmul`,
    `gated_delta` and `base_dtype` are config fields that files do not store. With a `base_dtype`,
    each matrix of the layers is quantized as soon as it is on the devices. A language model may be
    loaded with a "score" head, which is then zero; a sequence classifier has no logits.
    `on_progress` receives (bytes read, total bytes).

    Raises ValueError, listing the names, for missing, unexpected or misshaped tensors.
    """
    folder = resolve_model(path)
    cfg = dataclasses.replace(
        folder_config(folder),
        heads=heads,
        labels=labels,
        stacked=stacked,
        grouped_matmul=grouped_matmul,
        gated_delta=gated_delta,
    )
    stored_cfg = dataclasses.replace(cfg, base_dtype=base_dtype)
    specs, tensors, mesh = decoder_specs(cfg), find_tensors(folder), jax.sharding.get_mesh()
    check_mesh(stored_cfg, mesh.shape, rules)
    log_scheme(folder, base_dtype)
    log_skipped(folder)
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


def classifier_config(folder: Path) -> DecoderConfig:
    """`model_config` with the labels of a sequence classifier.

    Their names are those of its config.json, or LABEL_0, LABEL_1, ... A folder without a score head
    has one.
    """
    tensors = find_tensors(folder)
    n = tensors[SCORE].shape[0] if SCORE in tensors else 1
    names = read_object(config_path(folder), ADVICE).get("id2label") or {}
    labels = tuple(str(names.get(str(i), f"LABEL_{i}")) for i in range(n))
    return dataclasses.replace(model_config(folder), labels=labels)


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
        labels=decoder.labels,
    )[1]


def read_param(
    spec: ParamSpec, infos: list[FileTensor], sharding: NamedSharding, dtype: DTypeLike
) -> jax.Array:
    """One parameter in its sharding; stacked ones read a tensor per layer (and expert)."""
    tensor_indices = np.arange(len(infos)).reshape(spec.stacked_shape)
    n_lead = tensor_indices.ndim
    slices: dict[Any, np.ndarray] = {}  # devices that hold the same slice share the read

    def read(index: tuple[slice, ...]) -> np.ndarray:
        if not n_lead:
            return np.array(tensor_slice(spec, infos[0], index), dtype)
        here, rest = tensor_indices[index[:n_lead]], index[n_lead:]
        out = np.empty((*here.shape, *slice_shape(spec.shape[n_lead:], rest)), dtype)
        for i in np.ndindex(here.shape):
            out[i] = tensor_slice(spec, infos[here[i]], rest)
        return out

    def device_slice(index: Any) -> np.ndarray:
        bounds = tuple((s.start, s.stop) for s in index)
        if bounds not in slices:
            slices[bounds] = read(index)
        return slices[bounds]

    return jax.make_array_from_callback(spec.shape, sharding, device_slice)


def tensor_slice(spec: ParamSpec, info: FileTensor, index: tuple[slice, ...]) -> np.ndarray:
    """A slice of one tensor in the shape of `spec`; of a quantized one only it is dequantized."""
    if not isinstance(info, QuantizedTensor):
        return spec.from_file(map_tensor(info))[(*index, ...)]  # an array, of a scalar too
    shape = spec.shape[len(spec.stacked_shape) :]
    return info.read(file_places(spec, index)).reshape(slice_shape(shape, index))


def slice_shape(shape: tuple[int, ...], index: tuple[slice, ...]) -> tuple[int, ...]:
    return tuple(len(range(*part.indices(n))) for part, n in zip(index, shape, strict=True))


def file_places(spec: ParamSpec, index: tuple[slice, ...]) -> list[np.ndarray]:
    """The numbers in the file, one array for each axis there, of a slice in the shape here."""
    shape, found, first = spec.shape[len(spec.stacked_shape) :], [], 0
    for n in spec.hf_shape:
        end = first + 1
        while math.prod(shape[first:end]) < n:
            end += 1
        numbers = np.arange(n) if found else np.arange(n)[spec.file_rows]
        found.append(numbers.reshape(shape[first:end])[index[first:end]].reshape(-1))
        first = end
    return found


def log_skipped(folder: Path) -> None:
    """Lists the parts of the files that are no parameters of the language model."""
    skipped = skipped_parts(folder)
    if skipped and hosts.is_main_process():
        parts = ", ".join(f"{part} ({n} tensors)" for part, n in skipped.items())
        logger.warning("%s: %s are not loaded with the language model", folder, parts)


def log_scheme(folder: Path, base_dtype: str) -> None:
    """Says the format of quantized weights, and what becomes of them."""
    scheme = folder_scheme(folder)
    if scheme is None or not hosts.is_main_process():
        return
    again = f", and layers are quantized again to {base_dtype}" if base_dtype else ""
    logger.warning(
        "%s has weights in %s: they are dequantized to bfloat16 while they are loaded%s. Exports "
        "are not quantized: bfloat16, or the dtype of the run",
        folder,
        scheme.title,
        again,
    )
