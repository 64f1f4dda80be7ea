"""A state as checkpoints hold it: a plain nested dict by key path.

Neither module classes nor the layout of layers show in it. Where a checkpoint holds layers as a list
and the program wants them stacked on a leading axis, or the other way round, `Reader` translates.
"""

import collections
import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding

from jaxrl.types import Tree


class StructureError(ValueError):
    """The checkpoint is of another architecture or optimizer."""


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
    """Where a wanted leaf lies in the checkpoint: all of one leaf, one slice of it, or several leaves."""

    paths: tuple[str, ...]
    kind: str = "whole"  # "whole" | "slice" | "stack"
    index: int = 0  # of the slice


def find_piece(path: str, shape: tuple[int, ...], saved: Mapping[str, Any]) -> Piece | None:
    """The part of the checkpoint that is the leaf `path`; None where there is none.

    A leaf of a list of layers, "layers/3/attn/q/w" [..], is slice 3 of "layers/attn/q/w" [L, ..].
    """
    if path in saved:
        return Piece((path,))
    parts = path.split("/")
    for at, part in enumerate(parts):
        whole = "/".join(parts[:at] + parts[at + 1 :])
        if part.isdigit() and whole in saved and saved[whole].shape[1:] == shape:
            return (
                Piece((whole,), "slice", int(part)) if int(part) < saved[whole].shape[0] else None
            )
    for at in range(1, len(parts) if shape else 0):
        head, tail = "/".join(parts[:at]), "/".join(parts[at:])
        layers = tuple(f"{head}/{i}/{tail}" for i in range(shape[0]))
        fits = all(name in saved and saved[name].shape == shape[1:] for name in layers)
        if fits and f"{head}/{shape[0]}/{tail}" not in saved:
            return Piece(layers, "stack")
    return None


def on_devices(leaf: Any) -> jax.sharding.Sharding:
    """The leaf's sharding; one over an abstract mesh is put on the mesh that is set.

    Scalars that eval_shape left without a sharding are replicated on that mesh.
    """
    sharding = getattr(leaf, "sharding", None)
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh):
        mesh = jax.sharding.get_mesh()
        return NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)
    if sharding is None and leaf.shape == ():
        return NamedSharding(jax.sharding.get_mesh(), jax.P())
    if sharding is None:
        raise ValueError(
            "restore needs to know where every array goes; give the abstract state shardings "
            "(jax.ShapeDtypeStruct(shape, dtype, sharding=...)), or the state itself"
        )
    return sharding


class Reader:
    """Matches the state a program wants with what a checkpoint holds.

    `request` is the tree to read from the checkpoint, `assemble` turns it into the wanted state.
    Raises StructureError naming the first leaves that do not fit.
    """

    def __init__(self, wanted: Tree, saved: Mapping[str, Any]):
        self.treedef = jax.tree.structure(wanted)
        self.wanted = by_path(wanted)
        self.shardings = {path: on_devices(leaf) for path, leaf in self.wanted.items()}
        found = {path: find_piece(path, leaf.shape, saved) for path, leaf in self.wanted.items()}
        check_structure(self.wanted, saved, found)
        self.pieces = {path: piece for path, piece in found.items() if piece is not None}
        self.saved = saved

    def request(self) -> dict[str, Any]:
        """Abstract leaves of the checkpoint's own layout, laid out so that assembling moves nothing."""
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
        """The wanted state from what was read; a stack is freed as soon as it is taken apart."""
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
    """Raises StructureError with the first leaves that are missing, left over or of another kind."""
    problems = [f"{path} is not in it" for path, piece in found.items() if piece is None]
    used = {name for piece in found.values() if piece is not None for name in piece.paths}
    problems += [f"{path} is in it but not in this run" for path in saved if path not in used]
    slices = collections.Counter(p.paths[0] for p in found.values() if p and p.kind == "slice")
    problems += [
        f"{path} has {saved[path].shape[0]} layers in it and {n} in this run"
        for path, n in slices.items()
        if saved[path].shape[0] != n
    ]
    for path, piece in found.items():
        if piece is None:
            continue
        have, want = saved[piece.paths[0]], wanted[path]
        if piece.kind == "whole" and tuple(have.shape) != tuple(want.shape):
            problems.append(
                f"{path} is {list(have.shape)} in it and {list(want.shape)} in this run"
            )
        elif have.dtype != want.dtype:
            problems.append(f"{path} is {have.dtype} in it and {want.dtype} in this run")
    problems.sort(key=lambda problem: not problem.startswith("params/"))
    if problems:
        shown = "; ".join(problems[:4])
        more = f"; and {len(problems) - 4} more" if len(problems) > 4 else ""
        raise StructureError(shown + more)
