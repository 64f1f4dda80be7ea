"""The step of the gated delta rule on NVIDIA GPUs: a Pallas kernel in Triton, one pass over states.

The columns of a state are independent of each other. A program handles some of those of one head,
reads them from the sequence's slot of the pool, keeps them in registers for all tokens of the step,
and writes them back.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxrl.kernels.choice import check_platform
from jaxrl.kernels.gated_delta.limits import unsupported_by_triton

COLUMNS = 32  # of a state per program: 16 kB at D = 128


def gated_delta_step_gpu(
    q, k, v, g, beta, states, slots, *, writes: bool = True, interpret: bool = False
):
    """`gated_delta_step_xla` in one pass over the states, in place.

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
    decay, beta = jnp.exp(g.astype(jnp.float32)), beta.astype(jnp.float32)
    width = min(COLUMNS, V)
    keys = pl.BlockSpec((None, T, None, D), lambda b, h, i: (b, 0, h * K // N, 0))
    gates = pl.BlockSpec((None, T, None), lambda b, h, i: (b, 0, h))
    values = pl.BlockSpec((None, T, None, width), lambda b, h, i: (b, 0, h, i))
    whole = pl.no_block_spec
    new_pool = [jax.ShapeDtypeStruct(states.shape, jnp.float32)] if writes else []
    out, *after = pl.pallas_call(
        functools.partial(_kernel, n_tokens=T),
        grid=(B, N, V // width),
        in_specs=[whole, keys, keys, values, gates, gates, whole],
        out_specs=[values, whole] if writes else [values],
        out_shape=[jax.ShapeDtypeStruct(v.shape, v.dtype), *new_pool],
        input_output_aliases={6: 1} if writes else {},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        name="gated_delta_step_gpu",
        interpret=interpret,
    )(slots, q, k, v, decay, beta, states)
    return out, *(after or [None])


def _kernel(slots, q, k, v, decay, beta, before, out, after=None, *, n_tokens: int):
    """Some columns of one head. Rows of padding that share a slot write what they read there."""
    row, head, part = (pl.program_id(axis) for axis in range(3))
    width = out.shape[1]
    place = slots[row], head, slice(None), pl.ds(part * width, width)
    state, scale = before[place], before.shape[2] ** -0.5
    for t in range(n_tokens):
        key, query = (a[t, :].astype(jnp.float32)[:, None] for a in (k, q))
        state = decay[t] * state
        read = jnp.sum(state * key, axis=0)
        change = beta[t] * (v[t, :].astype(jnp.float32) - read)
        state += key * change[None]
        out[t, :] = (scale * jnp.sum(state * query, axis=0)).astype(out.dtype)
    if after is not None:
        after[place] = state
