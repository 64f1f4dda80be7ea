"""The gated delta rule in chunks of tokens, by matrix products (plain XLA).

https://arxiv.org/abs/2412.06464, section 3.3: with the state S at the start of a chunk, the values
that its tokens write are x = (I + L)^-1 (beta v - beta exp(G) k S), where G sums g from the start
and L_ij = beta_i exp(G_i - G_j) k_i·k_j for j < i. Everything but the states between chunks
(chunk_states.py) is computed for all chunks at once. The letters are those of that module.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxrl.kernels.attention_spec import SAVED_NAME
from jaxrl.kernels.gated_delta.chunk_states import chunk_states, product
from jaxrl.kernels.gated_delta.runs import ChunkRuns
from jaxrl.kernels.gated_delta.unit_lower import unit_lower_inverse

CHUNK = 64
STRONGEST = -88.0  # its exp is below the smallest normal float32: the token forgets everything
# Tokens times value heads that are computed together, to bound the memory of the backward pass.
MAX_WORK = 8192 * 32


def gated_delta_chunked(q, k, v, g, beta, segments, state, parents=None):
    """`gated_delta_reference` on one device; operands of products have the dtype of `v`.

    The backward pass computes the forward pass again, so that the inputs are all it keeps.
    """
    (B, T, K, _), N = k.shape, v.shape[2]
    C = chunk_len(T) if parents is None else T // parents.shape[1]
    runs = ChunkRuns.of(_pad(segments, C), C, aligned=parents is not None)
    q, k = (split_chunks(a, C, K) for a in (q, k))
    v, g, beta = (split_chunks(a, C, K, N // K) for a in (v, g, beta))
    state = state.astype(jnp.float32).reshape(B, K, N // K, *state.shape[2:]).swapaxes(-1, -2)
    parents = None if parents is None else parents.T

    def compute(q, k, v, g, beta, state):
        pass_states = functools.partial(chunk_states, v.dtype, state=state, parents=parents)
        return chunk_outputs(runs, pass_states, q, k, v, g, beta)

    out, final = _by_group(compute, q, k, v, g, beta, state)
    out = join_chunks(out)[:, :T]
    final = final.swapaxes(-1, -2)
    return checkpoint_name(out, SAVED_NAME), final.reshape(B, N, *final.shape[-2:])


def chunk_len(n_tokens: int) -> int:
    """Tokens per chunk of a row: all up to 16, else the next power of two, at most 64."""
    return n_tokens if n_tokens <= 16 else min(CHUNK, 1 << (n_tokens - 1).bit_length())


def _pad(a, chunk: int):
    """[B, T, ...] padded to whole chunks."""
    return jnp.pad(a, [(0, 0), (0, -a.shape[1] % chunk)] + [(0, 0)] * (a.ndim - 2))


def split_chunks(a, chunk: int, *heads: int):
    """[B, T, heads, ...] -> [n, B, *heads, chunk, ...], padded to whole chunks."""
    a = _pad(a, chunk).reshape(len(a), -1, chunk, *heads, *a.shape[3:])
    return jnp.moveaxis(jnp.moveaxis(a, 2, 2 + len(heads)), 1, 0)


def join_chunks(out):
    """[n, B, K, R, C, V] -> [B, n * C, K * R, V]."""
    n, B, K, R, C, V = out.shape
    return jnp.transpose(out, (1, 0, 4, 2, 3, 5)).reshape(B, n * C, K * R, V)


def _by_group(compute, q, k, v, g, beta, state):
    """`compute` on groups of key heads, one after the other, if they are much work together."""
    compute = jax.checkpoint(compute)
    K, work = k.shape[2], g.size
    groups = next(n for n in range(1, K + 1) if K % n == 0 and (work <= n * MAX_WORK or n == K))
    if groups == 1:
        return compute(q, k, v, g, beta, state)

    def divide(a, axis):
        return jnp.moveaxis(a.reshape(*a.shape[:axis], groups, -1, *a.shape[axis + 1 :]), axis, 0)

    def join(a, axis):
        return jnp.moveaxis(a, 0, axis).reshape(*a.shape[1 : axis + 1], -1, *a.shape[axis + 2 :])

    inputs = (*(divide(a, 2) for a in (q, k, v, g, beta)), divide(state, 1))
    out, final = lax.map(lambda xs: compute(*xs), inputs)
    return join(out, 2), join(final, 1)


def chunk_outputs(runs: ChunkRuns, pass_states, q, k, v, g, beta):
    """Outputs [n, B, K, R, C, V] of some key heads, and the states that `pass_states` returns.

    `pass_states(u, w, k, weight, decay)` is (corrected values, transposed states at the starts of
    the chunks, states after them), with the arguments of `chunk_states`.
    """
    dtype, scale = v.dtype, q.shape[-1] ** -0.5
    live, within, carried, last = (a[:, :, None, None] for a in runs.masks())
    g = jnp.where(live, jnp.maximum(g.astype(jnp.float32), STRONGEST), 0.0)
    beta = jnp.where(live, beta.astype(jnp.float32), 0.0)
    total = jnp.cumsum(g, axis=-1)
    differences = total[..., :, None] - total[..., None, :]
    pairs = jnp.where(within, jnp.exp(jnp.where(within, differences, 0.0)), 0.0)

    same_keys = product("nBKID,nBKJD->nBKIJ", k, k, dtype)[:, :, :, None]
    lower = jnp.tril(beta[..., :, None] * pairs * same_keys, -1)
    solve = unit_lower_inverse(lower) * beta[..., None, :]
    from_start = jnp.where(carried, jnp.exp(total), 0.0)
    to_end = jnp.where(last, jnp.exp(total[..., -1:] - total), 0.0)
    u = product("nBKRIJ,nBKRJV->nBKRIV", solve, v, dtype, dtype)
    w = product("nBKRIJ,nBKJD->nBKRID", solve * from_start[..., None, :], k, dtype, dtype)
    decay = jnp.where(runs.kept[:, :, None, None], jnp.exp(total[..., -1]), 0.0)
    x, starts, final = pass_states(u, w, k.astype(dtype), to_end, decay)
    scores = product("nBKID,nBKJD->nBKIJ", q, k, dtype)[:, :, :, None] * pairs
    out = product("nBKRIJ,nBKRJV->nBKRIV", scores, x, dtype)
    out += from_start[..., None] * product("nBKCD,nBKRVD->nBKRCV", q, starts, dtype)
    return jnp.where(live[..., None], scale * out, 0.0).astype(dtype), final
