"""The step of the gated delta rule on TPU: a Pallas kernel that reads and writes the state once.

A program handles some value heads of a sequence. Slots are known before the first program, so that
the next state is copied from the pool meanwhile. The state [D, V] of a head has V along the lanes,
so keys and queries are transposed to columns: D along the sublanes, the heads and tokens along the
lanes. XLA would write that layout with much padding. Products with single vectors run on the vector
unit, at the bandwidth of the state.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxrl.kernels.choice import check_platform
from jaxrl.kernels.gated_delta.limits import unsupported_by_mosaic

SUBLANES = 8  # of a float32 tile
MAX_HEADS = 16  # per program: 1 MB of state at D = V = 128, in, out, and both twice


def gated_delta_step_tpu(
    q,
    k,
    v,
    g,
    beta,
    states,
    slots,
    *,
    writes: bool = True,
    interpret: bool | pltpu.InterpretParams = False,
):
    """`gated_delta_step_xla` in one pass over the states, in place.

    `interpret` emulates the kernel on any backend: True with XLA, and InterpretParams with the
    memories and copies of a TPU. Raises NotImplementedError without a TPU and for unsupported
    sizes.
    """
    if not interpret:
        check_platform("config.model.gated_delta", "mosaic", "tpu")
    (B, T, N, V), D = v.shape, k.shape[-1]
    if not interpret and (why := unsupported_by_mosaic(T, D, V)):
        raise NotImplementedError(
            f"config.model.gated_delta='mosaic' does not support {why}; set it to 'auto' or 'xla'"
        )
    n = next(n for n in range(min(N, MAX_HEADS), 0, -1) if N % n == 0)
    vectors = jnp.concatenate([_vectors(a, N, n) for a in (k, q)], axis=2)
    n_keys = vectors.shape[2] // (2 * T)
    vectors = jnp.pad(vectors, ((0, 0), (0, 0), (0, -vectors.shape[2] % SUBLANES), (0, 0)))
    gates = jnp.stack([jnp.exp(g.astype(jnp.float32)), beta.astype(jnp.float32)])
    gates = gates.reshape(2, B, T, N // n, n).transpose(1, 3, 0, 2, 4)
    tokens = pl.BlockSpec((None, T, n, V), lambda b, i, _: (b, 0, i, 0))
    # Rows of padding that share a slot write what they read there: their order does not matter.
    pool = pl.BlockSpec((None, n, D, V), lambda b, i, slots: (slots[b], i, 0, 0))
    new_pool = [jax.ShapeDtypeStruct(states.shape, jnp.float32)] if writes else []
    out, *after = pl.pallas_call(
        functools.partial(_kernel, n_keys=n_keys),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(B, N // n),
            in_specs=[
                pl.BlockSpec((None, None, *vectors.shape[2:]), lambda b, i, _: (b, i, 0, 0)),
                tokens,
                pl.BlockSpec((None, None, 2, T, n), lambda b, i, _: (b, i, 0, 0, 0)),
                pool,
            ],
            out_specs=[tokens, pool] if writes else [tokens],
        ),
        out_shape=[jax.ShapeDtypeStruct(v.shape, v.dtype), *new_pool],
        input_output_aliases={4: 1} if writes else {},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        name="gated_delta_step_tpu",
        interpret=interpret,
    )(slots, vectors, v, gates, states)
    return out, *(after or [None])


def _vectors(a, n_heads: int, n: int):
    """[B, T, K, D] -> [B, programs, T * k, D] with the k heads of each program's n value heads."""
    B, T, K, D = a.shape
    if n * K % n_heads:  # programs that would share a head
        a = jnp.repeat(a, n_heads // K, axis=2)
    a = a.reshape(B, T, n_heads // n, -1, D)
    return a.swapaxes(1, 2).reshape(B, n_heads // n, -1, D)


def _kernel(_, vectors, v, gates, before, out, after=None, *, n_keys: int):
    (n_tokens, n), D = v.shape[:2], before.shape[1]
    decays, betas = gates[0], gates[1]
    columns, values = vectors[...].astype(jnp.float32).T, v[...].astype(jnp.float32)
    outputs = [[] for _ in range(n_tokens)]
    for h in range(n):
        state = before[h]
        for t in range(n_tokens):
            at = t * n_keys + h * n_keys // n
            key, query = (columns[:, i : i + 1] for i in (at, n_tokens * n_keys + at))
            state = decays[t : t + 1, h : h + 1] * state
            read = jnp.sum(state * key, axis=0, keepdims=True)
            change = betas[t : t + 1, h : h + 1] * (values[t, h : h + 1] - read)
            state = state + key * change
            outputs[t].append(D**-0.5 * jnp.sum(state * query, axis=0, keepdims=True))
        if after is not None:
            after[h] = state
    for t in range(n_tokens):
        out[t] = jnp.concatenate(outputs[t], axis=0).astype(out.dtype)
