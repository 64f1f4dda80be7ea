"""Matrix products of activations and weights [out, in], of one or several weights per call.

One signature, one implementation per platform and shape.
"""

from collections.abc import Sequence

import jax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int8

from jaxrl.kernels.cpu import ops
from jaxrl.kernels.matmul.cpu import matmuls_native
from jaxrl.kernels.matmul.reference import matmuls_reference
from jaxrl.kernels.matmul.xla import matmuls_xla

Weight = Float[Array, "_ I"] | Int8[Array, "_ I"]  # [out, in]

IMPLEMENTATIONS = {"native": matmuls_native, "reference": matmuls_reference, "xla": matmuls_xla}


def matmul(
    x: Float[Array, "B T I"], w: Weight, *, out_sharding: jax.P, dtype: DTypeLike | None = None
) -> Float[Array, "B T _"]:
    """x wᵀ [B, T, out], accumulated in and returned as `dtype` (default: that of the operands)."""
    return matmuls(x, [w], out_shardings=[out_sharding], dtype=dtype)[0]


def matmuls(
    x: Float[Array, "B T I"],
    weights: Sequence[Weight],
    *,
    out_shardings: Sequence[jax.P],
    dtype: DTypeLike | None = None,
    implementation: str | None = None,
) -> list[Float[Array, "B T _"]]:
    """`matmul` with each of the weights.

    One token per row (T = 1) is decode and needs no gradient. On one CPU device, float32 products
    of up to 64 rows then run at memory bandwidth, up to four weights per call, with the bits of
    XLA's product. int8 weights are converted to the dtype of `x`. `implementation` None selects by
    platform and shape.
    """
    if implementation is not None:
        return IMPLEMENTATIONS[implementation](x, weights, out_shardings, dtype)
    names = ["native" if ops.supports_skinny_matmul(x, w) else "xla" for w in weights]
    if set(names) == {"native"} and len(weights) <= ops.MAX_WEIGHTS:
        return matmuls_native(x, weights, out_shardings, dtype)
    return [
        IMPLEMENTATIONS[name](x, [w], [out], dtype)[0]
        for name, w, out in zip(names, weights, out_shardings, strict=True)
    ]
