"""The gated delta rule of a few tokens per sequence, from state to state (plain XLA)."""

import jax.numpy as jnp
from jax import lax

from jaxrl.kernels.gated_delta.chunk_states import product
from jaxrl.kernels.gated_delta.chunked import gated_delta_chunked


def gated_delta_step_xla(q, k, v, g, beta, states, slots, *, writes: bool = True):
    """The equation of one token, which reads the states twice; chunks for several tokens.

    Returns the outputs and the pool, or None for it unless it `writes`. The states are gathered
    from their slots and scattered to them. If XLA fused the two, it could not write to the pool
    that it still reads, and would copy it.
    """
    before = lax.optimization_barrier(states[slots])
    if v.shape[1] == 1:
        out, after = _one_token(q, k, v, g, beta, before)
    else:
        segments = jnp.ones(v.shape[:2], jnp.int32)
        out, after = gated_delta_chunked(q, k, v, g, beta, segments, before)
    return out, states.at[slots].set(after) if writes else None


def _one_token(q, k, v, g, beta, before):
    (B, _, K, D), (N, V) = k.shape, v.shape[2:]
    q, k, v = (a.astype(jnp.float32) for a in (q[:, 0], k[:, 0], v[:, 0]))
    v, g, beta = (a.reshape(B, K, N // K, *a.shape[2:]) for a in (v, g[:, 0], beta[:, 0]))
    decay = jnp.exp(g.astype(jnp.float32))
    before = before.reshape(B, K, N // K, D, V)
    both = jnp.stack([k, q], axis=2)
    read = decay[..., None, None] * product("BKXD,BKRDV->BKRXV", both, before, jnp.float32)
    change = beta[..., None] * (v - read[:, :, :, 0])
    after = decay[..., None, None] * before + k[:, :, None, :, None] * change[..., None, :]
    out = read[:, :, :, 1] + jnp.sum(q * k, axis=-1)[:, :, None, None] * change
    return (D**-0.5 * out).reshape(B, 1, N, V), after.reshape(B, N, D, V)
