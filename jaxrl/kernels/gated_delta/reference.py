"""Reference gated delta rule: one token after the other."""

import functools

import jax.numpy as jnp
from jax import lax

from jaxrl.kernels.gated_delta.runs import run_numbers

_einsum = functools.partial(jnp.einsum, precision="highest")


def gated_delta_reference(q, k, v, g, beta, segments, state, parents=None):
    """Outputs [B, T, Nv, Dv] and final states, from a `state` [B, Nv, Dk, Dv] per row.

    S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - exp(g_t) k_tᵀ S_{t-1}); o_t = Dk^-0.5 S_tᵀ q_t.

    float32, or float64 if the inputs are. `parents` [B, n] names for each of n equal parts of a row
    the part whose final state it starts from; -1 stands for `state`.
    """
    dtype, B, T = jnp.promote_types(v.dtype, jnp.float32), *segments.shape
    R, scale = v.shape[2] // k.shape[2], q.shape[-1] ** -0.5
    q, k, v, g, beta = (a.astype(dtype) for a in (q, k, v, g, beta))
    q, k = (jnp.repeat(a, R, axis=2) for a in (q, k))
    state, rows = state.astype(dtype), jnp.arange(B)
    runs = run_numbers(segments)
    part = T if parents is None else T // parents.shape[1]

    def token(carry, t):
        now, ends = carry
        if parents is None:
            new_run = (t > 0) & (runs[:, t] != runs[:, t - 1])
            now = jnp.where(new_run[:, None, None, None], 0.0, now)
        else:
            parent = parents[:, t // part]
            start = ends[parent + 1, rows]
            now = jnp.where(t % part == 0, start, now)
        live = (segments[:, t] > 0)[:, None, None]
        decayed = jnp.exp(g[:, t])[..., None, None] * now
        change = v[:, t] - _einsum("BNDV,BND->BNV", decayed, k[:, t])
        new = decayed + (beta[:, t, :, None] * k[:, t])[..., None] * change[..., None, :]
        now = jnp.where(live[..., None], new, now)
        out = jnp.where(live, scale * _einsum("BNDV,BND->BNV", now, q[:, t]), 0.0)
        return (now, ends.at[t // part + 1].set(now)), out

    ends = jnp.zeros((T // part + 1, *state.shape), dtype).at[0].set(state)
    (final, _), out = lax.scan(token, (state, ends), jnp.arange(T))
    return jnp.moveaxis(out, 0, 1), final
