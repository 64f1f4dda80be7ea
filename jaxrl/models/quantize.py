"""A model whose weight matrices lie in int8: the engine's copy of it, where `rollout.dtype` says so.

Every output of a matrix has a scale, so that the product is that of the int8 matrix, times the scales. In 8 bits
are the matrices of attention, MLPs and experts: what decoding reads. In their own type stay
- the embedding, of which a token reads one row, and the unembedding: its errors would be in the logits as they
  are, for a few per cent of the bytes of a large model;
- the routers of a mixture of experts: small, and a token sent to another expert is another function;
- norms and biases, which are small.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxrl.kernels.quantized import Quantized, quantize
from jaxrl.models.layers.linear import Linear
from jaxrl.models.layers.moe import MoE
from jaxrl.types import Tree


def quantize_int8(params: Tree, dtype: DTypeLike) -> Tree:
    """The model with its matrices in int8, made where they lie; all else is shared. `dtype` is that of the scales,
    and of activations."""
    return map_matrices(
        lambda w, n_in: _quantize(w, n_shared=n_in, dtype="int8", scale_dtype=jnp.dtype(dtype)),
        params,
    )


def int8_specs(specs: Tree) -> Tree:
    """PartitionSpecs of `quantize_int8`: a matrix's own, and for the scales those of its outputs."""
    return map_matrices(lambda spec, n_in: Quantized(spec, jax.P(*spec[:-n_in])), specs)


def map_matrices(fn: Callable[[Any, int], Any], model: Tree) -> Tree:
    """The model with fn(w, n) in the place of every matrix w of its layers, whose products sum over the last
    n axes. The leaves may be arrays, specs, or whatever stands for a weight."""

    def within(module: Any) -> Any:
        if not isinstance(module, Linear | MoE):
            return module
        new = jax.tree.map(lambda leaf: leaf, module)
        for name in ("w",) if isinstance(module, Linear) else ("gate", "up", "down"):
            n_in = len(module.axes) - module.n_out if isinstance(module, Linear) else 1
            setattr(new, name, nnx.data(fn(getattr(module, name), n_in)))
        return new

    return jax.tree.map(within, model, is_leaf=lambda node: isinstance(node, Linear | MoE))


_quantize = jax.jit(quantize, static_argnames=("n_shared", "dtype", "scale_dtype"))
