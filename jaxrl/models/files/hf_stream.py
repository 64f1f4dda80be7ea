"""Writing a Hugging Face folder from parts of arrays that arrive in any order.

Host memory holds one part at a time: the weight files are created first and mapped into memory.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import jax
import numpy as np

from jaxrl.models.config import DecoderConfig
from jaxrl.models.decoder import decoder_specs
from jaxrl.models.files.atomic_folder import atomic_folder
from jaxrl.models.files.export_form import ExportForm, export_form
from jaxrl.models.files.fused_experts import expert_part, joined_name
from jaxrl.models.files.hf_save import (
    SHARD_BYTES,
    SaveSettings,
    copied_parts,
    in_file_order,
    shard_files,
    write_index,
    write_settings,
)
from jaxrl.models.files.safetensors import Tensor, create_tensors
from jaxrl.models.spec import ParamSpec, hf_names, is_spec
from jaxrl.models.vision.names import is_of_tower

Box = tuple[slice, ...]  # of an array, with a start and a stop on every axis
Parts = Iterable[tuple[Box, np.ndarray]]


def specs_by_path(cfg: DecoderConfig) -> dict[str, ParamSpec]:
    """The parameter table by key path, for example "layers/0/attn/q/w"."""
    leaves = jax.tree_util.tree_leaves_with_path(decoder_specs(cfg), is_leaf=is_spec)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): spec for path, spec in leaves}


def stream_model(
    target: Path,
    cfg: DecoderConfig,
    dtypes: Mapping[str, np.dtype],
    read: Callable[[str], Parts],
    *,
    source: Path,
    settings: SaveSettings,
    max_shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes the folder that `save_model` writes of the same arrays.

    `dtypes` has the dtype of every parameter by key path. `read(path)` gives the parts of an array,
    which together are all of it; they are cast to the dtype.
    """
    form = export_form(cfg, source, text_only=settings.text_only)
    specs = {
        path: spec
        for path, spec in specs_by_path(cfg).items()
        if form.whole or not is_of_tower(spec.hf)
    }
    params = {
        name: Tensor(name, np.dtype(dtypes[path]), spec.hf_shape, lambda: np.zeros(0))
        for path, spec in specs.items()
        for name in hf_names(spec)
    }
    written = in_file_order(params.values(), form)
    copied = copied_parts(form, written)
    layout = {tensor.name: (tensor.dtype, tensor.shape) for tensor in (*written, *copied)}
    files = shard_files(layout, max_shard_bytes)
    with atomic_folder(target) as folder:
        stored: dict[str, np.ndarray] = {}
        for file, tensors in files.items():
            stored |= create_tensors(folder / file, tensors)
        maps = {name: _place(stored, name, form) for name in params}
        for path, spec in specs.items():
            for box, values in read(path):
                _write(maps, spec, box, values)
        for tensor in copied:
            stored[tensor.name][...] = tensor.read()
        for tensor in stored.values():
            if isinstance(tensor, np.memmap):
                tensor.flush()
        write_index(folder, files)
        write_settings(folder, cfg, written[0].dtype, source, form, settings)


def _place(stored: Mapping[str, np.ndarray], name: str, form: ExportForm) -> np.ndarray:
    """The values of a parameter in the tensors to write, of an expert in that of all."""
    if not form.joined or (joined := joined_name(name)) == name:
        return stored[form.file_name(name)]
    return expert_part(stored[form.file_name(joined)], name, interleaved=form.interleaved)


def _write(maps: Mapping[str, np.ndarray], spec: ParamSpec, box: Box, values: np.ndarray) -> None:
    """Copies a part of a parameter into its tensors; stacked layers are separate tensors."""
    names, n_lead = hf_names(spec), len(spec.stacked_shape)
    for index in _indices(box[:n_lead]):
        name = names[int(np.ravel_multi_index(index, spec.stacked_shape)) if n_lead else 0]
        start = tuple(i - part.start for i, part in zip(index, box, strict=False))
        shape, (rows, *rest) = spec.shape[n_lead:], box[n_lead:]
        if not spec.blocks:
            maps[name].reshape(shape)[rows, *rest] = values[start]
            continue
        # The first two axes are the rows of the file, in another order.
        order = spec.file_rows
        assert isinstance(order, np.ndarray)
        chosen = order.reshape(shape[:2])[rows, rest[0]]
        maps[name].reshape(-1, *shape[2:])[chosen, *rest[1:]] = values[start]


def _indices(box: Box) -> Iterator[tuple[int, ...]]:
    """The indices inside of a box."""
    for offset in np.ndindex(*(part.stop - part.start for part in box)):
        yield tuple(part.start + i for part, i in zip(box, offset, strict=True))
