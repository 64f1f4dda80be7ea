"""A training state as stored in checkpoints: a plain nested dict by key path.

The stored form has no module classes. If a checkpoint has layers as a list and the program wants
them stacked on a leading axis, or vice versa, `Reader` converts them.
"""

import collections
import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding

from jaxrl.types import Tree

MAX_SHOWN = 4  # differences in one error message


class StructureError(ValueError):
    """The checkpoint is from another architecture or optimizer."""


def by_path(tree: Tree) -> dict[str, Any]:
    """Leaves by key path, e.g. "params/layers/0/attn/q/w"."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `by_path` for a tree of dicts."""
    out: dict[str, Any] = {}
    for path, leaf in flat.items():
        *parents, name = path.split("/")
        node = out
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = leaf
    return out


@dataclasses.dataclass(frozen=True)
class Piece:
    """The saved leaves that make up one wanted leaf: one leaf, one slice of a leaf, or a stack."""

    paths: tuple[str, ...]
    kind: str = "whole"  # "whole" | "slice" | "stack"
    index: int = 0  # of the slice


def find_piece(path: str, shape: tuple[int, ...], saved: Mapping[str, Any]) -> Piece | None:
    """Finds the leaf `path` in the checkpoint; None if it is not there.

    A leaf in a list of layers, "layers/3/attn/q/w" [..], is slice 3 of "layers/attn/q/w" [L, ..].
    """
    if path in saved:
        return Piece((path,))
    parts = path.split("/")
    for at, part in enumerate(parts):
        stacked = "/".join(parts[:at] + parts[at + 1 :])
        if part.isdigit() and stacked in saved and saved[stacked].shape[1:] == shape:
            index = int(part)
            return Piece((stacked,), "slice", index) if index < saved[stacked].shape[0] else None
    for at in range(1, len(parts) if shape else 0):
        head, tail = "/".join(parts[:at]), "/".join(parts[at:])
        layers = tuple(f"{head}/{i}/{tail}" for i in range(shape[0]))
        fits = all(name in saved and saved[name].shape == shape[1:] for name in layers)
        if fits and f"{head}/{shape[0]}/{tail}" not in saved:
            return Piece(layers, "stack")
    return None


def concrete_sharding(leaf: Any) -> jax.sharding.Sharding:
    """The leaf's sharding, moved from an abstract mesh to the mesh that is set.

    Scalars that eval_shape left without a sharding are replicated on that mesh. Raises ValueError
    for other leaves without a sharding.
    """
    sharding = getattr(leaf, "sharding", None)
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh):
        mesh = jax.sharding.get_mesh()
        return NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)
    if sharding is None and leaf.shape == ():
        return NamedSharding(jax.sharding.get_mesh(), jax.P())
    if sharding is None:
        raise ValueError(
            "restore needs the sharding of every array; pass an abstract state with shardings "
            "(jax.ShapeDtypeStruct(shape, dtype, sharding=...)), or the state itself"
        )
    return sharding


class Reader:
    """Maps the leaves of a checkpoint to the leaves of the state that a program wants.

    `request` is the tree to read from the checkpoint, `assemble` turns it into the wanted state.
    Raises StructureError with the first leaves that do not match.
    """

    def __init__(self, wanted: Tree, saved: Mapping[str, Any]):
        self.treedef = jax.tree.structure(wanted)
        self.wanted = by_path(wanted)
        self.shardings = {path: concrete_sharding(leaf) for path, leaf in self.wanted.items()}
        found = {path: find_piece(path, leaf.shape, saved) for path, leaf in self.wanted.items()}
        check_structure(self.wanted, saved, found)
        self.pieces = {path: piece for path, piece in found.items() if piece is not None}
        self.saved = saved

    def request(self) -> dict[str, Any]:
        """Abstract leaves in the checkpoint's structure; assembling them moves no data."""
        out: dict[str, Any] = {}
        for path, piece in self.pieces.items():
            leaf, sharding = self.wanted[path], self.shardings[path]
            shape = leaf.shape
            if piece.kind == "stack":
                shape, sharding = shape[1:], without_layer_axis(sharding)
            elif piece.kind == "slice":
                shape = tuple(self.saved[piece.paths[0]].shape)
                sharding = with_layer_axis(sharding)
            for name in piece.paths:
                out[name] = jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)
        return nested(out)

    def assemble(self, tree: Tree) -> Tree:
        """The wanted state from the arrays that were read; a stack is freed once it is sliced."""
        read, leaves = by_path(tree), {}
        del tree
        for path, piece in self.pieces.items():
            if piece.kind == "whole":
                leaves[path] = read.pop(path)
            elif piece.kind == "stack":
                parts = [read.pop(name) for name in piece.paths]
                leaves[path] = jax.jit(jnp.stack, out_shardings=self.shardings[path])(parts)
            elif piece.paths[0] in read:
                stack = read.pop(piece.paths[0])
                same = [p for p, other in self.pieces.items() if other.paths == piece.paths]
                out = {p: self.shardings[p] for p in same}
                index = {p: self.pieces[p].index for p in same}
                take = jax.jit(
                    lambda a, index=index: {p: a[i] for p, i in index.items()}, out_shardings=out
                )
                leaves.update(take(stack))
        return jax.tree.unflatten(self.treedef, [leaves[path] for path in self.wanted])


def without_layer_axis(sharding: jax.sharding.Sharding) -> jax.sharding.Sharding:
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, jax.P(*sharding.spec[1:]))
    return sharding


def with_layer_axis(sharding: jax.sharding.Sharding) -> jax.sharding.Sharding:
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, jax.P(None, *sharding.spec))
    return sharding


def check_structure(
    wanted: Mapping[str, Any], saved: Mapping[str, Any], found: Mapping[str, Piece | None]
) -> None:
    """Raises StructureError with the first leaves that are missing, unexpected or different."""
    errors = [f"{path} is not in it" for path, piece in found.items() if piece is None]
    used = {name for piece in found.values() if piece is not None for name in piece.paths}
    errors += [f"{path} is in it but not in this run" for path in saved if path not in used]
    slices = collections.Counter(p.paths[0] for p in found.values() if p and p.kind == "slice")
    errors += [
        f"{path} has {saved[path].shape[0]} layers in it and {n} in this run"
        for path, n in slices.items()
        if saved[path].shape[0] != n
    ]
    for path, piece in found.items():
        if piece is None:
            continue
        have, want = saved[piece.paths[0]], wanted[path]
        if piece.kind == "whole" and tuple(have.shape) != tuple(want.shape):
            errors.append(f"{path} is {list(have.shape)} in it and {list(want.shape)} in this run")
        elif have.dtype != want.dtype:
            errors.append(f"{path} is {have.dtype} in it and {want.dtype} in this run")
    errors.sort(key=lambda error: not error.startswith("params/"))
    if errors:
        shown = "; ".join(errors[:MAX_SHOWN])
        more = f"; and {len(errors) - MAX_SHOWN} more" if len(errors) > MAX_SHOWN else ""
        raise StructureError(shown + more)
