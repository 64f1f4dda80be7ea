"""Reads only the weights of a checkpoint, for programs that run alongside a training run."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from jaxrl.checkpoint.checkpointer import complete_steps, verify
from jaxrl.checkpoint.errors import CheckpointError, one_line
from jaxrl.checkpoint.state_tree import (
    Piece,
    StructureError,
    by_path,
    check_structure,
    find_piece,
    nested,
)
from jaxrl.types import Tree

PARAMS = "params"  # the field of TrainState


def read_weights(directory: Path, step: int, wanted: Tree) -> Tree:
    """The parameters of the checkpoint `step` in host memory.

    The leaves of `wanted` have shapes and dtypes. Layers may be a list or stacked, whichever the
    checkpoint has, and values are cast to the wanted dtypes. `directory` is not modified. Raises
    CheckpointError if the checkpoint is missing, was removed in the meantime, is damaged or has
    another architecture.
    """
    directory = directory.absolute()  # orbax reads no relative paths
    path, leaves = directory / str(step), by_path({PARAMS: wanted})
    try:
        verify(directory, step)
        saved = saved_params(path)
        found = {name: find_piece(name, leaf.shape, saved) for name, leaf in leaves.items()}
        check_structure(with_saved_dtypes(leaves, found, saved), saved, found)
        read = by_path(read_arrays(path, saved))
        arrays = [
            assemble(piece, read).astype(leaves[name].dtype, copy=False)
            for name, piece in found.items()
            if piece is not None
        ]
    except StructureError as error:
        raise CheckpointError(
            f"the checkpoint {path} is from another model: {error}; use that model's config"
        ) from error
    except Exception as error:
        steps = complete_steps(directory)
        if step in steps:
            message = f"the checkpoint {path} cannot be read: {one_line(error)}"
        else:
            message = f"step {step} is not in {directory}: it has {steps or 'no checkpoint'}"
        raise CheckpointError(message) from error
    return jax.tree.unflatten(jax.tree.structure(wanted), arrays)


def saved_params(path: Path) -> dict[str, Any]:
    """Shapes and dtypes of the parameters in the checkpoint, by path."""
    saved = by_path(ocp.PyTreeCheckpointHandler().metadata(epath.Path(path / "state")).tree)
    return {name: leaf for name, leaf in saved.items() if name.startswith(f"{PARAMS}/")}


def with_saved_dtypes(
    leaves: dict[str, Any], found: dict[str, Piece | None], saved: dict[str, Any]
) -> dict[str, jax.ShapeDtypeStruct]:
    """The leaves with the dtypes that they have in the checkpoint."""
    dtypes = {name: saved[piece.paths[0]].dtype for name, piece in found.items() if piece}
    return {
        name: jax.ShapeDtypeStruct(leaf.shape, dtypes.get(name, leaf.dtype))
        for name, leaf in leaves.items()
    }


def read_arrays(path: Path, saved: dict[str, Any]) -> Tree:
    """The saved parameters as numpy arrays."""
    item = nested({n: jax.ShapeDtypeStruct(s.shape, s.dtype) for n, s in saved.items()})
    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), item)
    args = ocp.args.PyTreeRestore(item, restore_args=as_numpy, partial_restore=True)
    return ocp.PyTreeCheckpointHandler().restore(epath.Path(path / "state"), args=args)


def assemble(piece: Piece, read: dict[str, np.ndarray]) -> np.ndarray:
    """One leaf from the arrays in `read`; arrays that no other leaf needs are removed."""
    if piece.kind == "slice":
        return read[piece.paths[0]][piece.index]
    arrays = [read.pop(name) for name in piece.paths]
    return np.stack(arrays) if piece.kind == "stack" else arrays[0]
