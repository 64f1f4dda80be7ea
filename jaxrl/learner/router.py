"""Load-balancing loss and load metrics of the routers of a mixture of experts.

L = E Σ_e f_e P_e (https://arxiv.org/abs/2101.03961, equations 4-6, as transformers computes it):
f_e is the number of tokens routed to expert e over the number of tokens, P_e the mean router
probability of e, both over the tokens of all layers of the mini-batch. Perfect balance gives k, the
experts per token.

f_e has no gradient. With f_e known, L is a sum over tokens, so it does not depend on the split of
the mini-batch into micro-batches; a forward pass over all of them counts f_e before the first
gradient.
"""

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from jaxrl import types
from jaxrl.models.config import DecoderConfig
from jaxrl.models.layers.router import RouterLoad


@struct.dataclass
class Balance:
    """Expert load of a whole mini-batch, counted before its first gradient."""

    load: RouterLoad | None  # per layer with experts
    weight: types.Array  # float32 [], the divisor of the summed loss


def no_load(model: DecoderConfig) -> RouterLoad | None:
    """Zero load; None for a dense model."""
    experts = model.expert_layers
    if not experts:
        return None
    zeros = jnp.zeros((len(experts), experts[0].E), jnp.float32)
    return RouterLoad(prob=zeros, count=zeros, n_tokens=zeros[:, 0])


def balance_loss(load: RouterLoad, total: RouterLoad) -> Float[Array, ""]:
    """Contribution of the tokens of `load` to L over the tokens of `total`, which include them.

    Only `load` has a gradient, through the probabilities.
    """
    n = jnp.maximum(jnp.sum(total.n_tokens), 1.0)
    chosen = jnp.sum(total.count, axis=0) / n
    return total.count.shape[-1] * jnp.sum(chosen * jnp.sum(load.prob, axis=0)) / n


def router_metrics(load: RouterLoad | None) -> dict[str, Float[Array, ""]]:
    """L, and the maximum and minimum load of an expert in any layer, relative to the mean load."""
    if load is None:
        return {}
    mean = jnp.maximum(jnp.mean(load.count, axis=-1, keepdims=True), 1e-9)
    return {
        "router/balance_loss": balance_loss(load, load),
        "router/load_max": jnp.max(load.count / mean),
        "router/load_min": jnp.min(load.count / mean),
    }
