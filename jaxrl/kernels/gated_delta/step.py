"""The gated delta rule of a few tokens per sequence, from state to state (plain XLA)."""

import jax.numpy as jnp

from jaxrl.kernels.gated_delta.chunk_states import product
from jaxrl.kernels.gated_delta.chunked import gated_delta_chunked


def gated_delta_step_xla(q, k, v, g, beta, live, state):
    """The equation of one token, which reads the state twice; chunks for several tokens."""
    if v.shape[1] > 1:
        return gated_delta_chunked(q, k, v, g, beta, live.astype(jnp.int32), state)
    (B, _, K, D), (N, V) = k.shape, v.shape[2:]
    q, k, v = (a.astype(jnp.float32) for a in (q[:, 0], k[:, 0], v[:, 0]))
    v, g, beta = (a.reshape(B, K, N // K, *a.shape[2:]) for a in (v, g[:, 0], beta[:, 0]))
    decay = jnp.where(live[..., None], jnp.exp(g), 1.0)
    beta = jnp.where(live[..., None], beta, 0.0)
    before = state.reshape(B, K, N // K, D, V)
    both = jnp.stack([k, q], axis=2)
    read = decay[..., None, None] * product("BKXD,BKRDV->BKRXV", both, before, jnp.float32)
    change = beta[..., None] * (v - read[:, :, :, 0])
    after = decay[..., None, None] * before + k[:, :, None, :, None] * change[..., None, :]
    out = read[:, :, :, 1] + jnp.sum(q * k, axis=-1)[:, :, None, None] * change
    out = jnp.where(live[..., None, None], D**-0.5 * out, 0.0)
    return out.reshape(B, 1, N, V), after.reshape(state.shape)
