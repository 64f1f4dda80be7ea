"""The checkpoints of a run as weights to serve, while the run trains or after."""

import dataclasses
from pathlib import Path

import jax

from jaxrl.io.checkpoint.checkpointer import complete_steps
from jaxrl.io.checkpoint.weights import read_weights
from jaxrl.layout import Layout
from jaxrl.models.decoder import Decoder, with_heads
from jaxrl.models.layers.linear import Linear
from jaxrl.models.layers.moe import MoE
from jaxrl.types import Tree


@dataclasses.dataclass(frozen=True)
class Checkpoints:
    """The policies that a run has saved."""

    directory: Path
    policy: Decoder  # of ShapeDtypeStructs: the engine's dtype and shardings, the heads that the run trains
    layout: Layout  # of the engine

    def newest(self) -> int | None:
        """The last step whose checkpoint is complete."""
        return max(complete_steps(self.directory), default=None)

    def read(self, step: int) -> Decoder:
        """The language model of a step, in host memory. Raises CheckpointError."""
        return language_model(read_weights(self.directory, step, self.policy))

    def place(self, weights: Decoder) -> Tree:
        """Brings what was read onto the devices, as the engine reads it. Part after part, so that device memory
        holds one more than the weights at most."""

        def put(part: Tree, like: Tree) -> Tree:
            shardings = jax.tree.map(lambda leaf: leaf.sharding, like)
            return jax.block_until_ready(self.layout.quantize(jax.device_put(part, shardings)))

        like = language_model(self.policy)
        return jax.tree.map(put, weights, like, is_leaf=lambda node: isinstance(node, Linear | MoE))


def language_model(policy: Decoder) -> Decoder:
    """The policy without a head for values."""
    return with_heads(policy, ("vocab",))


def first_step(directory: Path, wanted: int | None, *, follow: bool) -> int:
    """The step to serve first: the one that is wanted, or the newest; 0 where a run that is followed has saved
    none yet. Raises ValueError where it is not there."""
    steps = complete_steps(directory)
    if wanted is None and (steps or follow):
        return max(steps, default=0)
    if not steps:
        raise ValueError(
            f"{directory} has no complete checkpoint; wait for the first one, or set --follow to begin with the "
            "model that the run began with"
        )
    if wanted not in steps:
        raise ValueError(f"step {wanted} is not in {directory}; set --step to one of {steps}")
    return wanted
