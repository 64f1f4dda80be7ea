"""Optimizer steps one layer at a time, for optimizer state in host memory.

The device then needs memory for the state of one layer instead of that of the whole model: the
state of a layer is copied to the device, updated and copied back before that of the next is read.
A built-in optimizer updates every tensor by itself, so a step computes the same as at once, up to
rounding. The embedding table and the unembedding are parts too. They can be larger than a layer,
and are updated in blocks of rows if the optimizer is elementwise.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrl.learner.optimizers.blocks import Blocks
from jaxrl.learner.optimizers.slices import put_slice, slice_count, take_slice
from jaxrl.models.spec import ParamSpec, is_spec, map_specs
from jaxrl.types import Tree
from sharding import restore_memory_space

# (specs, weight decays, factors of the learning rate or None) -> transformation of such parameters
Build = Callable[[Tree, Tree, Tree | None], optax.GradientTransformation]
# (state, gradients, transformation) -> state after a step, all on the device
Step = Callable[[Tree, Tree, optax.GradientTransformation], Tree]
OUTSIDE, STACKED = -1, -2  # parts that are no single layer
TABLES = {"embed": -3, "lm_head": -4}  # fields of a Decoder, each a part


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What an optimizer's transformation is built from."""

    build: Build
    specs: Tree
    decays: Tree
    factors: Tree | None
    elementwise: bool  # whether a step of some rows of a table is the same as with the others

    @property
    def parts(self) -> list[int]:
        """Indices of listed layers, STACKED, those of TABLES, and OUTSIDE for what is in none."""
        paths = jax.tree_util.tree_leaves_with_path(self.specs, is_leaf=is_spec)
        return sorted({part_of(path) for path, _ in paths})

    def is_divisible(self, params: Tree) -> bool:
        """Whether every device has a part of every layer; pipeline stages have whole layers."""
        stacked = jax.tree.leaves(select(params, STACKED)) if STACKED in self.parts else []
        return all(jax.typeof(a).sharding.spec[:1] != ("stage",) for a in stacked)

    def of_part(self, part: int) -> optax.GradientTransformation:
        """The transformation of one part's parameters."""
        factors = None if self.factors is None else select(self.factors, part)
        return self.build(select(self.specs, part), select(self.decays, part), factors)

    def of_layer(self, index: jax.Array) -> optax.GradientTransformation:
        """The transformation of one of stacked layers, with a leading axis of size 1."""

        def at(leaf: float | np.ndarray) -> Any:
            stacked = isinstance(leaf, np.ndarray) and leaf.shape[0] > 1
            return jnp.asarray(leaf)[index][None] if stacked else leaf

        def one(spec: ParamSpec) -> ParamSpec:
            return dataclasses.replace(spec, shape=(1, *spec.shape[1:]))

        specs = map_specs(one, select(self.specs, STACKED))
        decays = jax.tree.map(at, select(self.decays, STACKED))
        factors = self.factors
        if factors is not None:
            factors = jax.tree.map(at, select(factors, STACKED))
        return self.build(specs, decays, factors)


def step_by_layer(state: Tree, grads: Tree, recipe: Recipe, step: Step) -> Tree:
    """`step` of every part in turn; new arrays are in the memory of those that they replace."""
    done: list[Tree] = []
    for part in recipe.parts:
        old, grad = select(state, part), select(grads, part)
        if done:  # a part is read after the one before is written
            (old, grad), done[-1] = jax.lax.optimization_barrier(((old, grad), done[-1]))
        done.append(_step_part(old, grad, part, recipe, step))
    leaves = {path: leaf for tree in done for path, leaf in _leaves_with_path(tree)}
    return jax.tree_util.tree_map_with_path(lambda path, _: leaves[path], state)


def _step_part(state: Tree, grads: Tree, part: int, recipe: Recipe, step: Step) -> Tree:
    if part == STACKED:
        n_layers = jax.tree.leaves(grads)[0].shape[0]
        return _step_in_blocks(state, grads, n_layers, recipe.of_layer, step)
    transform = recipe.of_part(part)
    divides = part in TABLES.values() and recipe.elementwise
    if divides and (n_blocks := table_blocks((state, grads))) > 1:
        return _step_in_blocks(state, grads, n_blocks, lambda _: transform, step)
    return restore_memory_space(step(state, grads, transform), state)


def _step_in_blocks(
    state: Tree,
    grads: Tree,
    n_blocks: int,
    transform: Callable[[jax.Array], optax.GradientTransformation],
    step: Step,
) -> Tree:
    """A loop over equal blocks of the first axis, which updates the arrays in place.

    `transform(i)` is that of block i.
    """

    def block(tree: Tree, i: jax.Array) -> Tree:
        return jax.tree.map(lambda a: take_slice(a, i, n_blocks) if a.ndim else a, tree)

    def body(i: jax.Array, new: Tree) -> Tree:
        # Scalars, such as the number of steps, are those from before the step for every block.
        old = jax.tree.map(lambda a, was: a if a.ndim else was, new, state)
        updated = step(block(old, i), block(grads, i), transform(i))
        updated = restore_memory_space(updated, old)

        return jax.tree.map(lambda a, b: put_slice(a, b, i) if a.ndim else b, new, updated)

    return jax.lax.fori_loop(0, n_blocks, body, state)


def table_blocks(arrays: Tree) -> int:
    """Number of blocks of rows of a table and its state; 1 if their shapes differ."""
    tables = [a for a in jax.tree.leaves(arrays) if a.ndim]
    return 1 if len({a.shape for a in tables}) > 1 else slice_count(tables[0])


def part_of(path: tuple) -> int:
    """The part that a leaf at this path belongs to: any tree with parameters inside has parts."""
    names = [getattr(key, "name", getattr(key, "key", getattr(key, "idx", None))) for key in path]
    if "layers" not in names:
        return next((part for name, part in TABLES.items() if name in names), OUTSIDE)
    index = names[names.index("layers") + 1]
    return index if isinstance(index, int) else STACKED


def select(tree: Tree, part: int) -> Tree:
    """The tree with MaskedNode in place of other parts; scalars belong to all of them."""

    def keep(path: tuple, leaf: Any) -> Any:
        shared = isinstance(leaf, jax.Array) and not leaf.ndim
        return leaf if shared or part_of(path) == part else optax.MaskedNode()

    def is_leaf(node: Any) -> bool:
        return isinstance(node, Blocks) or is_spec(node)

    return jax.tree_util.tree_map_with_path(keep, tree, is_leaf=is_leaf)


def _leaves_with_path(tree: Tree) -> list[tuple[Any, Any]]:
    return jax.tree_util.tree_leaves_with_path(tree)
