"""Reads the arrays of a checkpoint into host memory, whatever mesh wrote them."""

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath

from jaxrl.checkpoint.checkpointer import complete_steps, verify
from jaxrl.checkpoint.errors import CheckpointError, one_line
from jaxrl.checkpoint.state_tree import Piece, StructureError, by_path, check_structure, find_piece
from jaxrl.types import Tree

PARAMS = "params"  # the field of TrainState


class SavedArrays:
    """The arrays of a step, by key path such as "params/layers/0/attn/q/w".

    The constructor verifies the checksums. All methods raise CheckpointError for a checkpoint that
    is missing, was removed in the meantime or is damaged. Nothing is written.
    """

    def __init__(self, directory: Path, step: int):
        self.folder = directory.absolute() / str(step)  # orbax reads no relative paths
        try:
            verify(directory, step)
            handler = ocp.PyTreeCheckpointHandler()
            saved = by_path(handler.metadata(epath.Path(self.folder / "state")).tree)
            self.shapes: dict[str, Any] = {  # leaves with shape and dtype
                name: leaf for name, leaf in saved.items() if hasattr(leaf, "shape")
            }
            metadata = json.loads((self.folder / "state" / "_METADATA").read_text())
            self._driver = "zarr3" if metadata.get("use_zarr3") else "zarr"
        except Exception as error:
            raise self._unreadable(error) from error

    def parts(self, name: str) -> Iterator[tuple[tuple[slice, ...], np.ndarray]]:
        """(box, values) of the array, one chunk of the checkpoint at a time."""
        try:
            array = self._open(name)
            chunk, shape = array.chunk_layout.read_chunk.shape or array.shape, array.shape
            ranges = [
                [slice(i, min(i + (n or size), size)) for i in range(0, size, n or size)]
                for n, size in zip(chunk, shape, strict=True)
            ]
            for box in itertools.product(*ranges):
                yield box, np.asarray(array[box].read().result())
        except (OSError, ValueError, RuntimeError) as error:
            raise self._unreadable(error) from error

    def read(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        """The whole arrays with these names, read at the same time."""
        try:
            reads = {name: self._open(name).read() for name in names}
            return {name: np.asarray(read.result()) for name, read in reads.items()}
        except (OSError, ValueError, RuntimeError) as error:
            raise self._unreadable(error) from error

    def _open(self, name: str) -> ts.TensorStore:
        base = (self.folder / "state").as_uri()
        path = name.replace("/", ".") + "/"
        store = {"driver": "ocdbt", "base": base + "/", "path": path}
        return ts.open({"driver": self._driver, "kvstore": store}, read=True, open=True).result()

    def _unreadable(self, error: Exception) -> CheckpointError:
        steps, folder = complete_steps(self.folder.parent), self.folder
        if int(folder.name) in steps:
            return CheckpointError(f"the checkpoint {folder} cannot be read: {one_line(error)}")
        listed = f"the steps {', '.join(map(str, steps))}" if steps else "no checkpoint"
        return CheckpointError(f"step {folder.name} is not in {folder.parent}; it has {listed}")


def read_weights(directory: Path, step: int, wanted: Tree) -> Tree:
    """The parameters of the checkpoint `step` in host memory.

    The leaves of `wanted` have shapes and dtypes. Layers may be a list or stacked, whichever the
    checkpoint has, and values are cast to the wanted dtypes. Raises CheckpointError as SavedArrays,
    and for another architecture.
    """
    arrays, leaves = SavedArrays(directory, step), by_path({PARAMS: wanted})
    saved = {n: leaf for n, leaf in arrays.shapes.items() if n.startswith(f"{PARAMS}/")}
    found = {name: find_piece(name, leaf.shape, saved) for name, leaf in leaves.items()}
    try:
        check_structure(_with_saved_dtypes(leaves, found, saved), saved, found)
    except StructureError as error:
        raise CheckpointError(
            f"the checkpoint {arrays.folder} is from another model: {error}; use that model's "
            f"config"
        ) from error
    read = arrays.read(saved)
    pieces = [
        _assemble(piece, read).astype(leaves[name].dtype, copy=False)
        for name, piece in found.items()
        if piece is not None
    ]
    return jax.tree.unflatten(jax.tree.structure(wanted), pieces)


def _with_saved_dtypes(
    leaves: Mapping[str, Any], found: Mapping[str, Piece | None], saved: Mapping[str, Any]
) -> dict[str, jax.ShapeDtypeStruct]:
    """The leaves with the dtypes that they have in the checkpoint."""
    dtypes = {name: saved[piece.paths[0]].dtype for name, piece in found.items() if piece}
    return {
        name: jax.ShapeDtypeStruct(leaf.shape, dtypes.get(name, leaf.dtype))
        for name, leaf in leaves.items()
    }


def _assemble(piece: Piece, read: dict[str, np.ndarray]) -> np.ndarray:
    """One leaf from the arrays in `read`; arrays that no other leaf needs are removed."""
    if piece.kind == "slice":
        return read[piece.paths[0]][piece.index]
    arrays = [read.pop(name) for name in piece.paths]
    return np.stack(arrays) if piece.kind == "stack" else arrays[0]
