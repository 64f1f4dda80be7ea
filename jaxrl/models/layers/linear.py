"""Linear map with its weight stored as [out, in], as in Hugging Face files."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxrl.kernels.cpu.skinny_matmul import Weight, matmuls
from jaxrl.kernels.quantized import Quantized
from jaxrl.models.spec import ParamSpec
from sharding import Rules, gather_matrix

MakeParam = Callable[..., Any]  # (suffix, shape, axes, init=, hf_shape=) -> leaf
# Weight axes whose activations have another logical axis.
ACTIVATION_AXES: dict[str | None, str] = {"w_embed": "embed"}


class Linear(nnx.Module):
    """y = x Wᵀ + b. `eq` is the einsum of (x, W), with W's dimensions ordered out, in.

    Both may be several dimensions. The product runs on [out, in] matrices. For a weight of three
    dimensions, XLA on CPU would first copy a transpose on every call, and a row's bits would depend
    on the number of rows.
    """

    def __init__(
        self,
        make: MakeParam,
        name: str,
        eq: str,
        shape: tuple[int, ...],
        axes: tuple[str | None, ...],
        *,
        hf_shape: tuple[int, int],
        bias: bool = False,
    ):
        x_dims, rest = eq.split(",")
        w_dims, out_dims = rest.split("->")
        self.n_out = sum(d not in x_dims for d in w_dims)
        if not (w_dims == out_dims[2:] + x_dims[2:] and x_dims[:2] == out_dims[:2] == "BT"):
            raise ValueError(f"{eq!r} is not a [B, T, in] x [out, in] product")
        self.axes = axes
        self.w = nnx.data(make(f"{name}.weight", shape, axes, hf_shape=hf_shape))
        bias_shape, self.bias_axes = shape[: self.n_out], axes[: self.n_out]
        self.b = nnx.data(
            make(f"{name}.bias", bias_shape, self.bias_axes, init="zeros", hf_shape=hf_shape[:1])
            if bias
            else None
        )

    def __call__(self, x: Float[Array, "B T *in"], rules: Rules) -> Float[Array, "B T *out"]:
        return apply_linears(x, self, rules=rules)[0]

    def weight(self, rules: Rules) -> Weight:
        """W as a matrix [out, in], gathered over the axes that shard only parameters (FSDP)."""
        w = self.w.values if isinstance(self.w, Quantized) else self.w
        return gather_matrix(w, rules, self.axes, self.n_out)

    def scale_and_bias(self, y: Float[Array, "B T O"], rules: Rules) -> Float[Array, "B T *out"]:
        """x Wᵀ reshaped to the output's dimensions, times the quantization scale, plus the bias."""
        out = rules.spec("batch", "time", *self.out_axes)
        y = jnp.reshape(y, (*y.shape[:2], *self.w.shape[: self.n_out]), out_sharding=out)
        if isinstance(self.w, Quantized):
            scale = jax.reshard(self.w.scale, rules.gathered(*self.bias_axes))
            y = (y.astype(jnp.float32) * scale).astype(y.dtype)
        y = materialize_gradient(y)
        return y if self.b is None else y + jax.reshard(self.b, rules.gathered(*self.bias_axes))

    @property
    def out_axes(self) -> list[str | None]:
        """Logical axes of the output."""
        return [ACTIVATION_AXES.get(axis, axis) for axis in self.axes[: self.n_out]]

    @property
    def in_axis(self) -> str | None:
        """Logical axis of the input; of merged dimensions, only the first is ever sharded."""
        axis = self.axes[self.n_out]
        return ACTIVATION_AXES.get(axis, axis)


def apply_linears(
    x: Float[Array, "B T *in"], *linears: Linear, rules: Rules
) -> list[Float[Array, "B T ..."]]:
    """Several linear maps of the same x; the decode kernel reads their weights in one call."""
    weights = [linear.weight(rules) for linear in linears]
    x_spec = rules.spec("batch", "time", linears[0].in_axis)
    x = jnp.reshape(x, (*x.shape[:2], weights[0].shape[1]), out_sharding=x_spec)
    outs = [rules.spec("batch", "time", linear.out_axes[0]) for linear in linears]
    ys = matmuls(x, weights, out_shardings=outs)
    return [linear.scale_and_bias(y, rules) for linear, y in zip(linears, ys, strict=True)]


@jax.custom_vjp
def materialize_gradient(y: jax.Array) -> jax.Array:
    """Identity; on CPU its gradient is materialized before use.

    dW = (dL/dy)ᵀ x reads dL/dy transposed. XLA's CPU backend otherwise computes the element-wise
    operations that lead to dL/dy (silu, for example) inside that transposing copy, one strided
    element at a time: the backward pass of an MLP then takes twice as long.
    """
    return y


def _materialize_backward(_, grad: jax.Array) -> tuple[jax.Array]:
    barrier = jax.lax.optimization_barrier
    return (jax.lax.platform_dependent(grad, cpu=barrier, default=lambda grad: grad),)


materialize_gradient.defvjp(lambda y: (y, None), _materialize_backward)


def make_spec(prefix: str, n_stacked: int = 0) -> MakeParam:
    """The `make` that fills a module with ParamSpecs; `n_stacked` layers get a leading axis."""
    leading = (n_stacked,) if n_stacked else ()

    def make(name, shape, axes, *, init="normal", hf_shape=None) -> ParamSpec:
        stacked_axes = ("layers",) * len(leading) + tuple(axes)
        return ParamSpec(
            leading + tuple(shape), stacked_axes, init, prefix + name, hf_shape or shape
        )

    return make
