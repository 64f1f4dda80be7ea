"""The weights of a checkpoint alone, for a program that looks on while another one trains."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from jaxrl.io.checkpoint.checkpointer import CheckpointError, complete_steps, reason
from jaxrl.io.checkpoint.state_tree import (
    Piece,
    StructureError,
    by_path,
    check_structure,
    find_piece,
    nested,
)
from jaxrl.types import Tree

PARAMS = "params"  # of a TrainState


def read_weights(directory: Path, step: int, wanted: Tree) -> Tree:
    """The parameters of the checkpoint `step` in host memory, nothing else of it.

    `wanted` has shapes and dtypes as leaves: layers may be a list or stacked whatever they were when saved,
    and other dtypes are cast to. Nothing is written or removed in `directory`. Raises CheckpointError where
    the checkpoint is not there (any more), is broken, or holds another architecture.
    """
    path, leaves = directory / str(step), by_path({PARAMS: wanted})
    try:
        saved = saved_params(path)
        found = {name: find_piece(name, leaf.shape, saved) for name, leaf in leaves.items()}
        check_structure(cast(leaves, found, saved), saved, found)
        read = by_path(read_host(path, saved))
        arrays = [
            assemble(piece, read).astype(leaves[name].dtype, copy=False)
            for name, piece in found.items()
            if piece is not None
        ]
    except StructureError as error:
        raise CheckpointError(f"the checkpoint {path} is of another model: {error}") from error
    except Exception as error:
        steps = complete_steps(directory)
        if step in steps:
            said = f"the checkpoint {path} cannot be read: {reason(error)}"
        else:
            said = f"step {step} is not in {directory}: it has {steps or 'no checkpoint'}"
        raise CheckpointError(said) from error
    return jax.tree.unflatten(jax.tree.structure(wanted), arrays)


def saved_params(path: Path) -> dict[str, Any]:
    """What the checkpoint holds below `params`, by path; shapes and dtypes, no numbers."""
    saved = by_path(ocp.PyTreeCheckpointHandler().metadata(epath.Path(path / "state")).tree)
    return {name: leaf for name, leaf in saved.items() if name.startswith(f"{PARAMS}/")}


def cast(
    leaves: dict[str, Any], found: dict[str, Piece | None], saved: dict[str, Any]
) -> dict[str, Any]:
    """The leaves in the dtypes that the checkpoint has them in."""
    dtypes = {name: saved[piece.paths[0]].dtype for name, piece in found.items() if piece}
    return {
        name: jax.ShapeDtypeStruct(leaf.shape, dtypes.get(name, leaf.dtype))
        for name, leaf in leaves.items()
    }


def read_host(path: Path, saved: dict[str, Any]) -> Tree:
    item = nested({n: jax.ShapeDtypeStruct(s.shape, s.dtype) for n, s in saved.items()})
    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), item)
    args = ocp.args.PyTreeRestore(item, restore_args=as_numpy, partial_restore=True)
    return ocp.PyTreeCheckpointHandler().restore(epath.Path(path / "state"), args=args)


def assemble(piece: Piece, read: dict[str, np.ndarray]) -> np.ndarray:
    """A leaf from the arrays of the checkpoint, which are let go where no other leaf is part of them."""
    if piece.kind == "slice":
        return read[piece.paths[0]][piece.index]
    arrays = [read.pop(name) for name in piece.paths]
    return np.stack(arrays) if piece.kind == "stack" else arrays[0]
