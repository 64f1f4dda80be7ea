"""Static parameters of attention, shared by the packed, ring and paged kernels."""

import dataclasses

import jax
import jax.numpy as jnp

from sharding import TRAIN, Rules

SAVED_NAME = "attention"  # of outputs and normalizers that the backward pass may keep


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """Score computation and sharding of one attention call.

    Hashable, so it is static under `jax.jit`, `shard_map` and `custom_vjp`. The sliding window is a
    separate argument: it differs between layers, and scanned layers pass it as a traced value.
    """

    scale: float  # of q kᵀ, usually head_dim ** -0.5
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap)
    rules: Rules = TRAIN
    whole_images: bool = False  # the tokens of an image see each other

    def scores(self, products: jax.Array) -> jax.Array:
        """cap(products * scale), with products = q kᵀ."""
        scores = products * self.scale
        if self.softcap is None:
            return scores
        return self.softcap * jnp.tanh(scores / self.softcap)
