"""A function of the logits of every token, without a [tokens, vocab] array and without gradient."""

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import DTypeLike

from jaxrl.kernels.logprob.chunked import Head, Kept, gather_weight

# (logits [c, v] of a chunk of tokens, further fields [c] of these tokens) -> results [c, ...]
OfLogits = Callable[..., tuple[jax.Array, ...]]


def chunk_map(
    head: Head,
    function: OfLogits,
    shapes: Sequence[tuple[tuple[int, ...], DTypeLike]],
    xs,
    ws,
    keep,
    *fields,
) -> tuple[jax.Array, ...]:
    """The results [B, T, ...] of `function` at every token of `keep`; zeros at the others.

    `shapes` has (shape of a token, dtype) of each result, which has no or one axis. xs, ws and keep
    are as in `chunked_logprob`, `fields` are [B, T].
    """
    rows, tokens, x_specs, w_specs, *_ = head.specs(len(xs), 0)
    local = jax.shard_map(
        functools.partial(_local, head, function, shapes),
        in_specs=(x_specs, w_specs, tokens, *(tokens for _ in fields)),
        out_specs=tuple(rows if shape else tokens for shape, _ in shapes),
        check_vma=False,
    )
    return local(xs, ws, keep, *fields)


def _local(head: Head, function: OfLogits, shapes, xs, ws, keep, *fields):
    n = keep.size
    c = max(math.ceil(n / math.ceil(n / head.chunk)), 2)  # as in chunked.py
    kept = Kept.of(keep, c)
    xs, fields = ([kept.rows(a) for a in arrays] for arrays in (xs, fields))
    ws = (gather_weight(head, ws[0]), *ws[1:])

    def chunk(i, carry):
        of_chunk = functools.partial(lax.dynamic_slice_in_dim, start_index=i * c, slice_size=c)
        logits = head.logits([of_chunk(x) for x in xs], ws)
        found = function(logits, *(of_chunk(field) for field in fields))
        pairs = zip(carry, found, strict=True)
        return tuple(
            lax.dynamic_update_slice(old, new, (i * c,) + (0,) * (new.ndim - 1))
            for old, new in pairs
        )

    n_rows = len(kept.order)
    start = tuple(jnp.zeros((n_rows, *shape), dtype) for shape, dtype in shapes)
    found = lax.fori_loop(0, -(-kept.count // c), chunk, start)
    return tuple(kept.back(a, keep) for a in found)
