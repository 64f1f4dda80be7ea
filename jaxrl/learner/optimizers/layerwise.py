"""Optimizer steps one part of the model at a time.

With optimizer state in host memory a part is a layer: its state is copied to the device, updated
and copied back before that of the next is read, so that the device needs memory for the state of
one layer. On the device, int8 moments and Muon need float32 moments or updates of all that a step
updates at a time; a part then is a block of layers with at most SLICE_BYTES of each tensor.
A built-in optimizer updates every tensor by itself, so a step computes the same as at once, up to
rounding. The embedding tables and the unembedding are parts too. They can be larger than a layer,
and are updated in blocks of rows if the optimizer is elementwise.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrl.learner.optimizers.blocks import QuantizedBlocks
from jaxrl.learner.optimizers.slices import block_count, put_slice, slice_count, take_slice
from jaxrl.models.spec import ParamSpec, is_spec, map_specs
from jaxrl.types import Tree
from sharding import restore_memory_space, target_platform

# (specs, weight decays, factors of the learning rate or None) -> transformation of such parameters
Build = Callable[[Tree, Tree, Tree | None], optax.GradientTransformation]
# (state, gradients, transformation) -> state after a step, all on the device
LayerStep = Callable[[Tree, Tree, optax.GradientTransformation], Tree]
LayerPart = tuple[int, ...]  # indices of listed layers, or one of these:
OUTSIDE, STACKED = -1, -2  # parts that are no single layer
# Fields of a Decoder, by the names of their paths, each a part.
TABLES = {("embed",): -3, ("lm_head",): -4, ("layer_inputs", "table"): -5}


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The parts from which an optimizer's transformation is built."""

    build: Build
    specs: Tree
    decays: Tree
    factors: Tree | None
    elementwise: bool  # whether a step of some rows of a table is the same as with the others
    needs_blocks: bool = False  # whether a step at once needs float32 copies of the whole model

    def parts(self, n_blocks: int) -> list[LayerPart]:
        """Blocks of listed layers or STACKED, those of TABLES, and OUTSIDE for what is in none."""
        paths = jax.tree_util.tree_leaves_with_path(self.specs, is_leaf=is_spec)
        found = sorted({part_of(path) for path, _ in paths})
        layers = [part for part in found if part >= 0]
        size = max(len(layers) // n_blocks, 1)
        blocks = [tuple(layers[i : i + size]) for i in range(0, len(layers), size)]
        return [*((part,) for part in found if part < 0), *blocks]

    def is_divisible(self, params: Tree) -> bool:
        """Whether every device has a part of every layer; pipeline stages have whole layers."""
        stacked = jax.tree.leaves(select(params, (STACKED,)))
        return all(jax.typeof(a).sharding.spec[:1] != ("stage",) for a in stacked)

    def of_part(self, part: LayerPart) -> optax.GradientTransformation:
        """The transformation of one part's parameters."""
        factors = None if self.factors is None else select(self.factors, part)
        return self.build(select(self.specs, part), select(self.decays, part), factors)

    def of_block(self, index: jax.Array, n_blocks: int) -> optax.GradientTransformation:
        """The transformation of one of `n_blocks` blocks of stacked layers."""

        def at(leaf: float | np.ndarray) -> Any:
            stacked = isinstance(leaf, np.ndarray) and leaf.shape[0] > 1
            return take_slice(jnp.asarray(leaf), index, n_blocks) if stacked else leaf

        def block(spec: ParamSpec) -> ParamSpec:
            shape = (spec.shape[0] // n_blocks, *spec.shape[1:])
            return dataclasses.replace(spec, shape=shape)

        specs = map_specs(block, select(self.specs, (STACKED,)))
        decays = jax.tree.map(at, select(self.decays, (STACKED,)))
        factors = self.factors
        if factors is not None:
            factors = jax.tree.map(at, select(factors, (STACKED,)))
        return self.build(specs, decays, factors)


def step_in_parts(
    state: Tree, grads: Tree, recipe: Recipe, step: LayerStep, *, n_blocks: int
) -> Tree:
    """`step` of every part in turn; new arrays are in the memory of those that they replace.

    The layers are `n_blocks` parts; it divides their number.
    """
    done: list[Tree] = []
    for part in recipe.parts(n_blocks):
        old, grad = select(state, part), select(grads, part)
        if done:  # a part is read after the one before is written
            (old, grad), done[-1] = jax.lax.optimization_barrier(((old, grad), done[-1]))
        done.append(_step_part(old, grad, part, recipe, step, n_blocks))
    leaves = {path: leaf for tree in done for path, leaf in _leaves_with_path(tree)}
    return jax.tree_util.tree_map_with_path(lambda path, _: leaves[path], state)


def _step_part(
    state: Tree, grads: Tree, part: LayerPart, recipe: Recipe, step: LayerStep, n_blocks: int
) -> Tree:
    if part == (STACKED,):
        of_block = functools.partial(recipe.of_block, n_blocks=n_blocks)
        return _step_in_blocks(state, grads, n_blocks, of_block, step)
    transform = recipe.of_part(part)
    divides = part[0] in TABLES.values() and recipe.elementwise
    if divides and (n_rows := table_blocks((state, grads))) > 1:
        return _step_in_blocks(state, grads, n_rows, lambda _: transform, step)
    return restore_memory_space(step(state, grads, transform), state)


def _step_in_blocks(
    state: Tree,
    grads: Tree,
    n_blocks: int,
    transform: Callable[[jax.Array], optax.GradientTransformation],
    step: LayerStep,
) -> Tree:
    """A loop over equal blocks of the first axis, which updates the arrays in place.

    `transform(i)` transforms block i.
    """

    def block(tree: Tree, i: jax.Array) -> Tree:
        return jax.tree.map(lambda a: take_slice(a, i, n_blocks) if a.ndim else a, tree)

    def body(i: jax.Array, new: Tree) -> Tree:
        # Scalars, such as the number of steps, are those from before the step for every block.
        old = jax.tree.map(lambda a, was: a if a.ndim else was, new, state)
        part, grad = block(old, i), block(grads, i)
        if target_platform() == "cpu":  # whose compiler otherwise copies whole arrays
            part, grad = jax.lax.optimization_barrier((part, grad))
        updated = step(part, grad, transform(i))
        updated = restore_memory_space(updated, old)

        return jax.tree.map(lambda a, b: put_slice(a, b, i) if a.ndim else b, new, updated)

    return jax.lax.fori_loop(0, n_blocks, body, state)


def layer_blocks(params: Tree, *, single: bool) -> int:
    """Number of equal blocks of layers: L if `single`; 1 without layers.

    Else the least with at most SLICE_BYTES of every tensor in float32 per device, or with one layer
    in a block.
    """
    arrays = [(part_of(path), a) for path, a in _leaves_with_path(params)]
    layers = [(part, a) for part, a in arrays if part == STACKED or part >= 0]
    stacked = any(part == STACKED for part, _ in layers)
    n_layers = layers[0][1].shape[0] if stacked else len({part for part, _ in layers})
    if single or not layers:
        return max(n_layers, 1)
    sizes = [math.prod(jax.typeof(a).sharding.shard_shape(a.shape)) for _, a in layers]
    return block_count(max(sizes) * (1 if stacked else n_layers), n_layers)


def table_blocks(arrays: Tree) -> int:
    """Number of blocks of rows of a table and its state, whose quantization blocks stay whole."""
    tables = [a for a in jax.tree.leaves(arrays) if a.ndim]
    rows = math.gcd(*(a.shape[0] for a in tables))
    return slice_count(max(tables, key=lambda a: a.size), rows)


def part_of(path: tuple) -> int:
    """The part that a leaf at this path belongs to: any tree with parameters inside has parts."""
    names = [getattr(key, "name", getattr(key, "key", getattr(key, "idx", None))) for key in path]
    if "layers" not in names:
        return next((part for path, part in TABLES.items() if set(path) <= {*names}), OUTSIDE)
    index = names[names.index("layers") + 1]
    return index if isinstance(index, int) else STACKED


def select(tree: Tree, part: LayerPart) -> Tree:
    """The tree with MaskedNode in place of other parts; scalars belong to all of them."""

    def keep(path: tuple, leaf: Any) -> Any:
        shared = isinstance(leaf, jax.Array) and not leaf.ndim
        return leaf if shared or part_of(path) in part else optax.MaskedNode()

    def is_leaf(node: Any) -> bool:
        return isinstance(node, QuantizedBlocks) or is_spec(node)

    return jax.tree_util.tree_map_with_path(keep, tree, is_leaf=is_leaf)


def _leaves_with_path(tree: Tree) -> list[tuple[Any, Any]]:
    return jax.tree_util.tree_leaves_with_path(tree)
