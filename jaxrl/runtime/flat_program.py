"""Compiled programs whose calls pass flat lists of arrays.

Flattening a model of listed modules, and building it again, is Python code: several milliseconds
of host time for 28 layers, which a plain `jax.jit` pays at every call. A `FlatTree` is flattened
once and passed to any number of calls.
"""

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import jax

from jaxrl.types import Tree


@jax.tree_util.register_pytree_with_keys_class
class FlatTree:
    """The leaves of a pytree in a list, and its structure; a pytree itself."""

    __slots__ = ("leaves", "structure")

    def __init__(self, leaves: Iterable[Any], structure: Any):
        self.leaves, self.structure = list(leaves), structure

    def tree_flatten(self) -> tuple[list[Any], Any]:
        return self.leaves, self.structure

    def tree_flatten_with_keys(self) -> tuple[list[Any], Any]:
        """Leaves with the names that they have in the tree, for messages of JAX."""
        paths = jax.tree_util.tree_leaves_with_path(unflatten(self))
        names = [jax.tree_util.keystr(path).removeprefix(".") for path, _ in paths]
        keys = map(jax.tree_util.GetAttrKey, names)
        return list(zip(keys, self.leaves, strict=True)), self.structure

    @classmethod
    def tree_unflatten(cls, structure: Any, leaves: Iterable) -> "FlatTree":
        return cls(leaves, structure)


def flatten(tree: Tree) -> FlatTree:
    """The tree as a `FlatTree`, unless it is one."""
    return tree if isinstance(tree, FlatTree) else FlatTree(*jax.tree.flatten(tree))


class Flattened:
    """Flattens the tree of the last call once, and forgets it when its owner drops it."""

    def __init__(self):
        self._kept: tuple[weakref.ref, FlatTree] | None = None

    def __call__(self, tree: Tree) -> FlatTree:
        """The tree as a `FlatTree`. It must not be changed in place."""
        if self._kept is not None and self._kept[0]() is tree:
            return self._kept[1]
        flat = flatten(tree)
        self._kept = weakref.ref(tree, self._forget), flat
        return flat

    def _forget(self, tree: weakref.ref) -> None:
        if self._kept is not None and self._kept[0] is tree:
            self._kept = None


def unflatten(tree: Tree) -> Tree:
    """The tree with the trees that its `FlatTree`s, and those in them, were made of."""

    def whole(node: Any) -> Any:
        if not isinstance(node, FlatTree):
            return node
        return unflatten(jax.tree.unflatten(node.structure, node.leaves))

    return jax.tree.map(whole, tree, is_leaf=lambda node: isinstance(node, FlatTree))


class FlatProgram:
    """A jitted function whose arguments may be trees or `FlatTree`s, with one program for both.

    The function gets trees. It may return `FlatTree`s for results that the next call takes.
    """

    def __init__(self, function: Callable, **options: Any):
        """`options` are those of `jax.jit`; arguments are passed by position."""

        @functools.wraps(function)
        def on_flat(*args: FlatTree) -> Any:
            return function(*map(unflatten, args))

        name = function.func if isinstance(function, functools.partial) else function
        on_flat.__name__ = name.__name__
        self._jitted: Any = jax.jit(on_flat, **options)

    def __call__(self, *args: Tree) -> Any:
        return self._jitted(*map(flatten, args))

    def lower(self, *args: Tree) -> jax.stages.Lowered:
        """The program for (abstract) arguments, as a call with such arguments runs it."""
        return self._jitted.lower(*map(flatten, args))

    @property
    def n_compiled(self) -> int:
        """Number of shapes and structures of arguments so far; constant after warm-up."""
        return self._jitted._cache_size()
