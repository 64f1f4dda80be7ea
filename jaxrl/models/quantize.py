"""Quantized weight matrices: an int8 copy for the engine (`rollout.dtype`), or a frozen base below
adapters in int8 or nf4 (`lora.base_dtype`).

With int8, every output of a matrix has a scale, so the product is that of the int8 matrix times the
scales. nf4 has a scale for every 64 inputs of an output. The matrices of attention, MLPs and
experts are quantized: what decode reads. The rest keeps its dtype:
- the embedding, of which a token reads one row, and the unembedding: its errors would appear in the
  logits directly, for a few per cent of a large model's bytes;
- the routers of a mixture of experts: they are small, and a token routed to another expert gets a
  different function;
- norms and biases, which are small.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxrl.kernels.nf4 import NF4, quantize_nf4
from jaxrl.kernels.quantized import Quantized, quantize
from jaxrl.models.decoder import Decoder
from jaxrl.models.layers.linear import Linear
from jaxrl.models.layers.moe import MoE
from jaxrl.types import Tree


def quantize_int8(params: Tree, dtype: DTypeLike) -> Tree:
    """The model with int8 matrices, quantized in their own sharding; all other leaves are shared.

    `dtype` is that of the scales and of activations.
    """
    return map_matrices(lambda w, n_in: quantize_matrix(w, n_in, "int8", dtype), params)


def quantize_matrix(w: jax.Array, n_in: int, kind: str, dtype: DTypeLike) -> Quantized | NF4:
    """A matrix whose products sum over its last `n_in` axes, as "int8" or "nf4".

    `dtype` is that of the scales.
    """
    if kind == "nf4":
        return _quantize_nf4(w, scale_dtype=jnp.dtype(dtype))
    return _quantize(w, n_shared=n_in, dtype="int8", scale_dtype=jnp.dtype(dtype))


def matrix_inputs(specs: Decoder) -> dict[str, int]:
    """By file name, how many of the last axes of the layers' weight matrices are inputs."""
    found: dict[str, int] = {}
    map_matrices(lambda spec, n_in: found.setdefault(spec.hf, n_in), specs)
    return found


def int8_specs(specs: Tree) -> Tree:
    """PartitionSpecs of `quantize_int8`: those of the matrices, and of their outputs for scales."""
    return map_matrices(lambda spec, n_in: Quantized(spec, jax.P(*spec[:-n_in])), specs)


def map_matrices(fn: Callable[[Any, int], Any], model: Tree) -> Tree:
    """The model with fn(w, n) in place of every weight matrix w of its layers.

    Products sum over the last n axes of w. Leaves may be arrays, specs or any other stand-in for a
    weight.
    """

    def map_module(module: Any) -> Any:
        if not isinstance(module, Linear | MoE):
            return module
        new = jax.tree.map(lambda leaf: leaf, module)
        for name in ("w",) if isinstance(module, Linear) else ("gate", "up", "down"):
            n_in = len(module.axes) - module.n_out if isinstance(module, Linear) else 1
            setattr(new, name, nnx.data(fn(getattr(module, name), n_in)))
        return new

    return jax.tree.map(map_module, model, is_leaf=lambda node: isinstance(node, Linear | MoE))


_quantize_nf4 = jax.jit(quantize_nf4, static_argnames="scale_dtype")
_quantize = jax.jit(quantize, static_argnames=("n_shared", "dtype", "scale_dtype"))
