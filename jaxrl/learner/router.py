"""The load-balancing loss of a mixture of experts, and what is told of its routers.

L = E Σ_e f_e P_e (https://arxiv.org/abs/2101.03961, equations 4-6, as transformers computes it): f_e is
the number of times that expert e was chosen over the number of tokens, P_e its mean probability, both
over the tokens of all layers of the mini-batch. Perfect balance gives k, the experts of a token.

f_e has no gradient. Once it is known, L is a sum over tokens, so it does not depend on how the
mini-batch is cut into micro-batches; it is counted in a forward pass over all of them beforehand.
"""

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from jaxrl import types
from jaxrl.models.config import DecoderConfig
from jaxrl.models.layers.moe import RouterLoad


@struct.dataclass
class Balance:
    """What a whole mini-batch sends to the experts, known before its first gradient."""

    load: RouterLoad | None  # of every layer
    weight: types.Array  # float32 [], by which the summed loss will be divided


def no_load(model: DecoderConfig) -> RouterLoad | None:
    """The load of no token; None of a dense model."""
    if not model.E:
        return None
    zeros = jnp.zeros((model.L, model.E), jnp.float32)
    return RouterLoad(prob=zeros, count=zeros, n_tokens=zeros[:, 0])


def balance_loss(load: RouterLoad, among: RouterLoad) -> Float[Array, ""]:
    """The share of `load`'s tokens in L over the tokens `among` which they are; `load` alone carries a
    gradient, through the probabilities."""
    n = jnp.maximum(jnp.sum(among.n_tokens), 1.0)
    chosen = jnp.sum(among.count, axis=0) / n
    return among.count.shape[-1] * jnp.sum(chosen * jnp.sum(load.prob, axis=0)) / n


def router_metrics(load: RouterLoad | None) -> dict[str, Float[Array, ""]]:
    """The loss L, and the largest and smallest load of an expert in any layer, over the mean load."""
    if load is None:
        return {}
    mean = jnp.maximum(jnp.mean(load.count, axis=-1, keepdims=True), 1e-9)
    return {
        "router/balance_loss": balance_loss(load, load),
        "router/load_max": jnp.max(load.count / mean),
        "router/load_min": jnp.min(load.count / mean),
    }
