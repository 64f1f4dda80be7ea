"""Memory order of arrays between projections and splash attention, which reads [N, B * T, H].

XLA on TPU stores the products q, k and v, and the gradient of the output of attention, with tokens
minor, and copies each of them to heads, tokens and features. Row-major products need no such copy.
"""

import jax
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float

HEADS_FIRST = (2, 0, 1, 3)  # [B, T, N, H] as [N, B, T, H]


def row_major(x: Float[Array, "B T N H"]) -> Float[Array, "B T N H"]:
    """Identity; each device stores its value and its gradient as row-major [B, T, N * H]."""

    def local(x: jax.Array) -> jax.Array:
        flat = x.reshape(*x.shape[:2], -1)
        return with_layout_constraint(flat, Layout((0, 1, 2))).reshape(x.shape)

    spec = jax.typeof(x).sharding.spec
    return jax.shard_map(local, in_specs=spec, out_specs=spec, check_vma=False)(x)


@jax.custom_vjp
def row_major_gradient(x: Float[Array, "B T N H"]) -> Float[Array, "B T N H"]:
    """Identity with the gradient of `row_major`."""
    return x


row_major_gradient.defvjp(lambda x: (x, None), lambda _, gradient: (row_major(gradient),))
