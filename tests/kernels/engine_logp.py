"""The logprob of given tokens, formed as engine/sampling.py forms that of the token it drew."""

import jax.numpy as jnp

from jaxrl.kernels.bits import settle
from jaxrl.kernels.logprob import token_logp


def engine_logp(logits, token):
    """logits [B, V], divided by the temperature; token [B]."""
    logits = settle(logits)
    top = settle(jnp.max(logits, axis=-1))
    chosen = jnp.take_along_axis(logits, token[:, None], axis=1)[:, 0]
    return token_logp(chosen, top, settle(jnp.exp(logits - top[:, None])))
