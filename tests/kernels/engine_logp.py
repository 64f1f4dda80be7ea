"""Logprobs of given tokens, as engine/device/sampling.py computes those of sampled tokens."""

import jax.numpy as jnp

from jaxrl.kernels.bits import materialize
from jaxrl.kernels.logprob import token_logp


def engine_logp(logits, token):
    """logits [B, V], divided by the temperature; token [B]."""
    logits = materialize(logits)
    top = materialize(jnp.max(logits, axis=-1))
    chosen = jnp.take_along_axis(logits, token[:, None], axis=1)[:, 0]
    return token_logp(chosen, top, materialize(jnp.exp(logits - top[:, None])))
