"""Reductions over the tokens that count. What stands at a masked token reaches neither value nor gradient."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def only(x: Float[Array, "B T"], mask: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """x where the mask is set, else 0. A select, not a product: 0 * inf would be NaN."""
    return jnp.where(mask > 0, x, 0.0)


def masked_sum(x: Float[Array, "B T"], mask: Float[Array, "B T"]) -> Float[Array, ""]:
    """Σ mask x over all tokens."""
    return jnp.sum(only(x, mask) * mask)


def masked_mean(
    x: Float[Array, "B T"], mask: Float[Array, "B T"]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """(Σ mask x, Σ mask): the mean in parts, to be added over micro-batches and divided once."""
    return masked_sum(x, mask), jnp.sum(mask)


def masked_max(x: Float[Array, "B T"], mask: Float[Array, "B T"]) -> Float[Array, ""]:
    """The largest x of a counted token; -inf where there is none."""
    return jnp.max(jnp.where(mask > 0, x, -jnp.inf))
