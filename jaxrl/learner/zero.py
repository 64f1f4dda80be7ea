"""ZeRO-1 and ZeRO-2: optimizer state and gradients are sharded over replicas too."""

import dataclasses

import jax

from jaxrl.models.spec import is_spec
from jaxrl.types import Tree
from sharding import TRAIN, Rules


@dataclasses.dataclass(frozen=True)
class Zero:
    """ZeRO: the training state that replicas share (https://arxiv.org/abs/1910.02054, section 5).

    The weights keep the sharding of `rules`. Level 1: moments, master weights and moving average
    are sharded by `rules.over_replicas()`. Every replica updates its shard of the weights, and the
    new weights are all-gathered. Level 2: so are the gradients that micro-batches are added to.
    Arrays without a dimension `w_embed`, such as norms and biases, stay replicated.
    """

    level: int
    rules: Rules

    def shard(self, weights: Tree) -> Tree:
        """Arrays of the weights' shapes and shardings, in the sharding of the optimizer state."""
        if not self.level or self.rules.n_shards("replicas") == 1:
            return weights
        return jax.tree.map(self._shard, weights)

    def shard_gradients(self, grads: Tree) -> Tree:
        """Gradients in the sharding in which they are summed."""
        return self.shard(grads) if self.level >= 2 else grads

    def _shard(self, array: jax.Array) -> jax.Array:
        whole, finer = self.rules.w_embed, self.rules.over_replicas().w_embed
        spec = jax.typeof(array).sharding.spec
        return jax.reshard(array, jax.P(*(finer if part == whole else part for part in spec)))


NO_ZERO = Zero(0, TRAIN)


def as_sharded(tree: Tree, like: Tree) -> Tree:
    """`tree` with the shardings of `like`; the opposite of `Zero.shard`."""

    def gather(array: jax.Array, ref: jax.Array) -> jax.Array:
        spec = jax.typeof(ref).sharding.spec
        return array if jax.typeof(array).sharding.spec == spec else jax.reshard(array, spec)

    return jax.tree.map(gather, tree, like)


def check_zero(specs: Tree, rules: Rules) -> None:
    """Raises ValueError if replicas cannot share the shards of the weights evenly.

    The mesh is the current one.
    """
    n = rules.over_replicas().n_shards("w_embed")
    sizes = {
        size
        for spec in jax.tree.leaves(specs, is_leaf=is_spec)
        for size, axis in zip(spec.shape, spec.axes, strict=True)
        if axis == "w_embed" and size % n
    }
    if sizes:
        over = " x ".join(f"mesh.{axis}" for axis in rules.over_replicas().mesh_axes("w_embed"))
        raise ValueError(
            f"config.learner.zero shards the optimizer state over {over}, which are {n} devices "
            f"and do not divide {' and '.join(map(str, sorted(sizes)))} model features; set sizes "
            "that divide them, or config.learner.zero=0"
        )
