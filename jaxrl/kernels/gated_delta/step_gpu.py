"""The step of the gated delta rule on NVIDIA GPUs: a Pallas kernel in Triton, one pass over states.

The columns of a state are independent of each other. A program handles some of those of one head,
keeps them in registers for all tokens of the step, and writes them back.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxrl.kernels.choice import check_platform
from jaxrl.kernels.gated_delta.limits import unsupported_by_triton

COLUMNS = 32  # of a state per program: 16 kB at D = 128


def gated_delta_step_gpu(q, k, v, g, beta, live, state, *, interpret: bool = False):
    """`gated_delta_step_xla` in one pass over the state.

    `interpret` emulates the kernel with XLA on any backend. Raises NotImplementedError without a
    GPU and for unsupported sizes.
    """
    if not interpret:
        check_platform("config.model.gated_delta", "triton", "gpu")
    (B, T, N, V), (K, D) = v.shape, k.shape[2:]
    if why := unsupported_by_triton(T, D, V):
        raise NotImplementedError(
            f"config.model.gated_delta='triton' does not support {why}; set it to 'auto' or 'xla'"
        )
    decay = jnp.where(live[..., None], jnp.exp(g.astype(jnp.float32)), 1.0)
    beta = jnp.where(live[..., None], beta.astype(jnp.float32), 0.0)
    scale = jnp.broadcast_to(jnp.where(live, D**-0.5, 0.0)[..., None], decay.shape)
    width = min(COLUMNS, V)
    keys = pl.BlockSpec((None, T, None, D), lambda b, h, i: (b, 0, h * K // N, 0))
    gates = pl.BlockSpec((None, T, None), lambda b, h, i: (b, 0, h))
    values = pl.BlockSpec((None, T, None, width), lambda b, h, i: (b, 0, h, i))
    states = pl.BlockSpec((None, None, D, width), lambda b, h, i: (b, h, 0, i))
    return pl.pallas_call(
        functools.partial(_kernel, n_tokens=T),
        grid=(B, N, V // width),
        in_specs=[keys, keys, values, gates, gates, gates, states],
        out_specs=[values, states],
        out_shape=[
            jax.ShapeDtypeStruct(v.shape, v.dtype),
            jax.ShapeDtypeStruct(state.shape, jnp.float32),
        ],
        input_output_aliases={6: 1},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        name="gated_delta_step_gpu",
        interpret=interpret,
    )(q, k, v, decay, beta, scale, state)


def _kernel(q, k, v, decay, beta, scale, before, out, after, *, n_tokens: int):
    state = before[...]
    for t in range(n_tokens):
        key, query = (a[t, :].astype(jnp.float32)[:, None] for a in (k, q))
        state = decay[t] * state
        read = jnp.sum(state * key, axis=0)
        change = beta[t] * (v[t, :].astype(jnp.float32) - read)
        state += key * change[None]
        out[t, :] = (scale[t] * jnp.sum(state * query, axis=0)).astype(out.dtype)
    after[...] = state
