"""The backward pass of an attention, compiled for devices that are not attached, and its cost."""

import functools
import re

import jax
import jax.numpy as jnp

from jaxrl.kernels.attention_spec import AttentionSpec
from jaxrl.kernels.visibility import Visibility
from jaxrl.planner.compiled.cost import program_cost
from jaxrl.planner.compiled.kernels import attention_work
from tests.kernels.abstract_arrays import abstract


def check_compiled_gradients(
    attend, mesh, *, rules, shape, heads, block, softcap=None, places=1, shared=False, sinks=False
):
    """Compiles the gradients of `attend`; asserts its flops and that no scores are materialized.

    Args:
      shape: (rows, tokens per row).
      heads: (query heads, kv heads, width).
      block: keys per block of the kernel.
      places: of the ring. In each of as many steps a query attends to half of the keys of a place.
      sinks: whether heads have sinks.
      shared: whether segments share prefixes. The first range of a query is counted as all keys.
    """
    (B, T), (N, K, H) = shape, heads
    with jax.set_mesh(mesh):
        q, k = (
            abstract(
                mesh, (B, T, n_heads, H), jnp.bfloat16, rules.spec("batch", "time", name, None)
            )
            for n_heads, name in ((N, "heads"), (K, "kv_heads"))
        )
        rows = abstract(mesh, (B, T), jnp.int32, rules.spec("batch", "time"))

        def loss(q, k, v, segments, visibility, window, sinks):
            how = dict(spec=AttentionSpec(H**-0.5, softcap, rules), window=window, sinks=sinks)
            out = attend(q, k, v, segments=segments, visibility=visibility, **how)
            return jnp.sum(out.astype(jnp.float32) ** 2)

        visibility = Visibility(rows, rows) if shared else None
        logits = abstract(mesh, (N,), jnp.bfloat16, rules.spec("heads")) if sinks else None
        args = q, k, k, rows, visibility, jax.ShapeDtypeStruct((), jnp.int32), logits
        argnums = (0, 1, 2, 6) if sinks else (0, 1, 2)
        compiled = jax.jit(jax.grad(loss, argnums)).lower(*args).compile()
    work = functools.partial(attention_work, keys=T / 2 / places)
    text, further = compiled.as_text(), re.compile("further_ranges")
    assert bool(further.search(text)) == shared
    cost = program_cost(text, lambda loop: 0.0 if further.search(loop) else None, work)
    # A query attends to half of the keys and half of its block. Forward 2 products, backward 3 and
    # 4.
    macs = B * N * T * (T / places + block) / 2 * places * H / mesh.size
    assert cost.total_flops == (2 + 3 + 4) * 2 * macs
    scores = 4 * B * N * T * T / mesh.size  # bytes per device of materialized scores
    assert compiled.memory_analysis().temp_size_in_bytes < scores / 4
