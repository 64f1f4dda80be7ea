"""The step of the gated delta rule on TPU: a Pallas kernel that reads and writes the state once.

A program handles some value heads of a sequence. The state [D, V] of a head has V along the lanes,
so keys and queries come as columns: D along the sublanes, the heads and tokens along the lanes.
Products with single vectors run on the vector unit, at the bandwidth of the state.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxrl.kernels.choice import check_platform
from jaxrl.kernels.gated_delta.limits import unsupported_by_mosaic

MAX_HEADS = 16  # per program: 1 MB of state at D = V = 128, in, out, and both twice


def gated_delta_step_tpu(q, k, v, g, beta, live, state, *, interpret: bool = False):
    """`gated_delta_step_xla` in one pass over the state.

    `interpret` emulates the kernel with XLA on any backend. Raises NotImplementedError without a
    TPU and for unsupported sizes.
    """
    if not interpret:
        check_platform("config.model.gated_delta", "mosaic", "tpu")
    (B, T, N, V), D = v.shape, k.shape[-1]
    if not interpret and (why := unsupported_by_mosaic(T, D, V)):
        raise NotImplementedError(
            f"config.model.gated_delta='mosaic' does not support {why}; set it to 'auto' or 'xla'"
        )
    n = next(n for n in range(min(N, MAX_HEADS), 0, -1) if N % n == 0)
    decay = jnp.where(live[..., None], jnp.exp(g.astype(jnp.float32)), 1.0)
    beta = jnp.where(live[..., None], beta.astype(jnp.float32), 0.0)
    scale = jnp.broadcast_to(jnp.where(live, D**-0.5, 0.0)[..., None], decay.shape)
    columns = jnp.concatenate([_columns(a, N, n) for a in (k, q)], axis=-1)
    gates = jnp.stack([decay, beta, scale]).reshape(3, B, T, N // n, n).transpose(1, 3, 0, 2, 4)
    tokens = pl.BlockSpec((None, T, n, V), lambda b, i: (b, 0, i, 0))
    states = pl.BlockSpec((None, n, D, V), lambda b, i: (b, i, 0, 0))
    out, state = pl.pallas_call(
        functools.partial(_kernel, n_tokens=T),
        grid=(B, N // n),
        in_specs=[
            pl.BlockSpec((None, None, D, 2 * n * T), lambda b, i: (b, i, 0, 0)),
            tokens,
            pl.BlockSpec((None, None, 3, T, n), lambda b, i: (b, i, 0, 0, 0)),
            states,
        ],
        out_specs=[tokens, states],
        out_shape=[
            jax.ShapeDtypeStruct(v.shape, v.dtype),
            jax.ShapeDtypeStruct(state.shape, jnp.float32),
        ],
        input_output_aliases={3: 1},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        name="gated_delta_step_tpu",
        interpret=interpret,
    )(columns, v, gates, state)
    return out, state


def _columns(a, n_heads: int, n: int):
    """[B, T, K, D] -> [B, programs, D, n * T] with the n heads of each program."""
    B, T, K, D = a.shape
    a = jnp.repeat(a, n_heads // K, axis=2).reshape(B, T, -1, n, D)
    return a.transpose(0, 2, 4, 3, 1).reshape(B, n_heads // n, D, n * T)


def _kernel(columns, v, gates, before, out, after, *, n_tokens: int):
    n = before.shape[0]
    decays, betas, scales = (gates[i] for i in range(3))
    vectors, values = columns[...].astype(jnp.float32), v[...].astype(jnp.float32)
    outputs = [[] for _ in range(n_tokens)]
    for h in range(n):
        state = before[h]
        for t in range(n_tokens):
            at = h * n_tokens + t
            key, query = (vectors[:, i : i + 1] for i in (at, n * n_tokens + at))
            state = decays[t : t + 1, h : h + 1] * state
            read = jnp.sum(state * key, axis=0, keepdims=True)
            change = betas[t : t + 1, h : h + 1] * (values[t, h : h + 1] - read)
            state = state + key * change
            read = jnp.sum(state * query, axis=0, keepdims=True)
            outputs[t].append(scales[t : t + 1, h : h + 1] * read)
        after[h] = state
    for t in range(n_tokens):
        out[t] = jnp.concatenate(outputs[t], axis=0).astype(out.dtype)
