"""The states between the chunks of a row: the one sequential part of the chunked form.

A chunk starts from the state S of its parent, corrects its values to x = u - w S, and ends with
the state decay S + kᵀ (weight x). Forward keeps the state at the start of every chunk, and no state
per token. The backward pass is written out: differentiated by JAX, a row whose chunks read the
states of earlier ones would cost the square of its chunks.

States are transposed, [V, D]: then the products of the value heads that share a key are one matrix
product whose result needs no transposition.

Letters: n chunks, B rows, K key heads, R value heads per key head, C tokens, D and V widths.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3, 4))
def product(subscripts: str, a: jax.Array, b: jax.Array, dtype, out_dtype=jnp.float32) -> jax.Array:
    """Einsum of operands in `dtype`, summed in float32.

    So are the products of the backward pass; JAX's own have float32 operands.
    """
    precision = "highest" if dtype == jnp.float32 else None
    a, b = a.astype(dtype), b.astype(dtype)
    return jnp.einsum(subscripts, a, b, precision=precision, preferred_element_type=out_dtype)


def _product_forward(subscripts, a, b, dtype, out_dtype):
    # Of the operands, the gradients need the rounded values and the dtype.
    saved = a.astype(dtype), b.astype(dtype), a[:0], b[:0]
    return product(subscripts, a, b, dtype, out_dtype), saved


def _product_backward(subscripts, dtype, _, saved, gradient):
    a, b, like_a, like_b = saved
    operands, out = subscripts.split("->")
    of_a, of_b = operands.split(",")
    d_a = product(f"{out},{of_b}->{of_a}", gradient, b, dtype)
    d_b = product(f"{out},{of_a}->{of_b}", gradient, a, dtype)
    return d_a.astype(like_a.dtype), d_b.astype(like_b.dtype)


product.defvjp(_product_forward, _product_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def chunk_states(dtype, u, w, k, weight, decay, state, parents):
    """(corrected values, states at the starts of chunks, final states).

    Args:
      dtype: of the operands of products, and of the returned states at starts.
      u: [n, B, K, R, C, V] in `dtype`, values before the correction.
      w: [n, B, K, R, C, D] in `dtype`.
      k: [n, B, K, C, D] in `dtype`.
      weight: float32 [n, B, K, R, C], of each token in the state at the end of its chunk.
      decay: float32 [n, B, K, R], of the state at the start of a chunk until its end.
      state: float32 [B, K, R, V, D], before the first chunk.
      parents: int32 [n, B], the chunk whose final state each one starts from, or -1 for `state`.
        None: the chunk before it.
    """
    return _forward(dtype, u, w, k, weight, decay, state, parents)[0]


def _forward(dtype, u, w, k, weight, decay, state, parents):
    def chunk(ends, xs):
        (u, w, k, weight, decay), parent, c = xs
        start = _read(ends, parent)
        x = u - product("BKRCD,BKRVD->BKRCV", w, start, dtype)
        update = product("BKRCV,BKCD->BKRVD", weight[..., None] * x, k, dtype)
        end = decay[..., None, None] * start + update
        ends = end if parent is None else lax.dynamic_update_index_in_dim(ends, end, c + 1, 0)
        return ends, (x.astype(dtype), start.astype(dtype))

    inputs = (u, w, k, weight, decay)
    n = len(u)
    ends = state
    if parents is not None:
        ends = jnp.zeros((n + 1, *state.shape), state.dtype).at[0].set(state)
    ends, (x, starts) = lax.scan(chunk, ends, (inputs, parents, jnp.arange(n)))
    final = ends if parents is None else ends[n]
    return (x, starts, final), (*inputs[1:], x, starts, parents)


def _at(ends, index):
    """ends[index], read once.

    Without the barrier XLA on TPU reads it again after `ends` has changed, from a copy of all.
    """
    return lax.optimization_barrier(lax.dynamic_index_in_dim(ends, index, keepdims=False))


def _read(ends, parent):
    """The state at the end of each row's parent, of `ends` [n + 1, B, ...].

    A slice per row, because a gather on TPU reads the states of all chunks.
    """
    if parent is None:
        return ends
    rows = [lax.dynamic_slice(ends, at, (1, 1, *ends.shape[2:])) for at in _places(ends, parent)]
    return lax.optimization_barrier(jnp.concatenate(rows, axis=1)[0])


def _places(ends, parent):
    """The indices in `ends` of the state at the end of each row's parent."""
    rest = (0,) * (ends.ndim - 2)
    return [(parent[b] + 1, b, *rest) for b in range(len(parent))]


def _backward(dtype, residuals, cotangents):
    w, k, weight, decay, x, starts, parents = residuals
    d_x, d_starts, d_final = cotangents
    n = len(w)

    def chunk(d_ends, xs):
        (w, k, weight, decay, x, start, d_x, d_start), parent, c = xs
        d_end = d_ends if parent is None else _at(d_ends, c + 1)
        read = product("BKCD,BKRVD->BKRCV", k, d_end, dtype)
        d_x = d_x + weight[..., None] * read
        d_weight = jnp.sum(read * x, axis=-1)
        d_decay = jnp.sum(d_end * start, axis=(-2, -1))
        into = decay[..., None, None] * d_end + d_start
        into -= product("BKRCV,BKRCD->BKRVD", d_x, w, dtype)
        d_ends = into if parent is None else _add(d_ends, parent, into)
        return d_ends, (d_x.astype(dtype), d_end.astype(dtype), d_weight, d_decay)

    d_ends = d_final
    if parents is not None:
        d_ends = jnp.zeros((n + 1, *d_final.shape), d_final.dtype).at[n].set(d_final)
    inputs = (w, k, weight, decay, x, starts, d_x, d_starts)
    xs = (inputs, parents, jnp.arange(n))
    d_ends, (d_x, d_end, d_weight, d_decay) = lax.scan(chunk, d_ends, xs, reverse=True)
    d_w = -product("nBKRCV,nBKRVD->nBKRCD", d_x, starts, dtype)
    d_k = product("nBKRCV,nBKRVD->nBKCD", weight[..., None] * x, d_end, dtype)
    d_state = d_ends if parents is None else d_ends[0]
    d_parents = None if parents is None else np.zeros(parents.shape, jax.dtypes.float0)
    return d_x, d_w.astype(w.dtype), d_k.astype(k.dtype), d_weight, d_decay, d_state, d_parents


def _add(d_ends, parent, into):
    """Adds each row's `into` to its parent's entry of `d_ends` [n + 1, B, ...]."""
    for b, at in enumerate(_places(d_ends, parent)):
        new = lax.dynamic_slice(d_ends, at, (1, 1, *d_ends.shape[2:])) + into[b]
        d_ends = lax.dynamic_update_slice(d_ends, new, at)
    return d_ends


chunk_states.defvjp(_forward, _backward)
