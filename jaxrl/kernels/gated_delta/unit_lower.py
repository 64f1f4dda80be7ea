"""Inverse of unit lower triangular matrices by products of blocks.

Forward substitution has as many dependent steps as a matrix has rows, and a power series of the
matrix overflows float32 if keys are alike. Inverting the diagonal blocks first and merging pairs of
them has log2 of the rows, and is as stable as substitution.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

BASE = 16  # rows of the smallest blocks: below this, masked products of whole blocks are faster
_matmul = functools.partial(jnp.matmul, precision="highest", preferred_element_type=jnp.float32)


@jax.custom_vjp
def unit_lower_inverse(lower: jax.Array) -> jax.Array:
    """(I + L)^-1 of strictly lower triangular L [..., C, C] in float32.

    C is at most 16, or 16 times a power of two.
    """
    return _inverse(lower)


def _inverse(lower):
    C = lower.shape[-1]
    if C <= BASE:
        return _base_inverse(lower)
    h = C // 2
    blocks = jnp.stack([lower[..., :h, :h], lower[..., h:, h:]])
    first, second = _inverse(blocks)
    below = -_matmul(second, _matmul(lower[..., h:, :h], first))
    top = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
    return jnp.concatenate([top, jnp.concatenate([below, second], axis=-1)], axis=-2)


def _base_inverse(lower):
    """Merges pairs of blocks of 1, 2, 4, ... rows, all pairs of a size in one product."""
    C = lower.shape[-1]
    row, column = np.indices((C, C))
    inverse, b = jnp.broadcast_to(jnp.eye(C, dtype=lower.dtype), lower.shape), 1
    while b < C:
        merged = (row // (2 * b) == column // (2 * b)) & (row // b > column // b)
        below = jnp.where(merged, lower, 0.0)
        if b > 1:
            below = _matmul(inverse, _matmul(below, inverse))
        inverse, b = inverse - below, 2 * b
    return inverse


def _forward(lower):
    inverse = _inverse(lower)
    return inverse, inverse


def _backward(inverse, d_inverse):
    transposed = jnp.swapaxes(inverse, -1, -2)
    product = _matmul(transposed, _matmul(d_inverse, transposed))
    return (-jnp.tril(product, -1),)


unit_lower_inverse.defvjp(_forward, _backward)
