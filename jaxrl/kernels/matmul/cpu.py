"""Skinny matrix products, by the C kernel for CPUs (kernels/cpu)."""

from collections.abc import Sequence

import jax

from jaxrl.kernels.cpu import ops


def matmuls_native(
    x: jax.Array, weights: Sequence[jax.Array], out_shardings: Sequence[jax.P], dtype=None
) -> list[jax.Array]:
    """All weights in one call; float32 whatever `dtype`.

    Raises NotImplementedError for what the kernel does not compute.
    """
    if len(weights) > ops.MAX_WEIGHTS or not all(ops.supports_skinny_matmul(x, w) for w in weights):
        raise NotImplementedError(
            "matmul: 'native' multiplies one float32 token per row, of at most "
            f"{ops.MAX_ROWS} rows, by at most {ops.MAX_WEIGHTS} weights on one CPU device"
        )
    local = jax.shard_map(
        lambda x, *weights: [y[:, None] for y in ops.skinny_matmul(x[:, 0], *weights)],
        in_specs=jax.P(),
        out_specs=jax.P(),
        check_vma=False,
    )
    ys = local(*(jax.reshard(a, jax.P()) for a in (x, *weights)))
    return [jax.reshard(y, out) for y, out in zip(ys, out_shardings, strict=True)]
