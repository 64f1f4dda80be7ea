"""Limits of a linear layer's inputs and outputs, which the towers of Gemma 4 E2B and E4B have."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxrl.models.layers.stored import MakeParam

SUFFIX = ".linear"  # of the layer within the one that has limits, in files


class Limits(nnx.Module):
    """Scalars between which every input and every output of a linear layer is clipped.

    They are statistics of the checkpoint and not trained. Definition: transformers'
    `Gemma4ClippableLinear`, which clips what its linear layer, with an adapter, gets and gives.
    """

    def __init__(self, make: MakeParam, name: str):
        part = name.removesuffix(SUFFIX)

        def scalar(kind: str) -> Any:
            init = "minus_infinity" if kind.endswith("min") else "infinity"
            return nnx.data(make(f"{part}.{kind}", (), (), init=init))

        self.input_min, self.input_max = scalar("input_min"), scalar("input_max")
        self.output_min, self.output_max = scalar("output_min"), scalar("output_max")

    def clip_input(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        return clip(x, self.input_min, self.input_max)

    def clip_output(self, y: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        return clip(y, self.output_min, self.output_max)


def clip(x: Float[Array, "*B"], low: jax.Array, high: jax.Array) -> Float[Array, "*B"]:
    """min(max(x, low), high), whose gradient is one from `low` to `high`, both included.

    That is the gradient of torch.clamp. Outputs are often equal to a limit of the next layer,
    where the gradient of jnp.clip is a half.
    """
    low, high = (jax.lax.stop_gradient(one).astype(x.dtype) for one in (low, high))
    limited = jax.lax.stop_gradient(jnp.minimum(jnp.maximum(x, low), high))
    return jnp.where((low <= x) & (x <= high), x, limited)
