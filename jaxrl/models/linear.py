"""A linear map whose weight lies [out, in], as in Hugging Face files."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxrl.kernels.few_rows import product
from jaxrl.kernels.quantized import Quantized
from jaxrl.models.spec import ParamSpec
from sharding import Rules, gather_matrix

MakeParam = Callable[..., Any]  # (suffix, shape, axes, init=, hf_shape=) -> leaf
ACTIVATION: dict[str | None, str] = {
    "w_embed": "embed"
}  # axes of a weight that are called otherwise in what it maps


class Linear(nnx.Module):
    """y = x Wᵀ + b. `eq` is the einsum of (x, W), whose dimensions are out, then in; each may be several.

    The product runs on [out, in] matrices: from a weight of three dimensions XLA would first copy a
    transpose on CPU, on every call, and a row's bits would then depend on the number of rows.
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
            raise ValueError(f"{eq!r} is no [B, T, in] x [out, in] product")
        self.axes = axes
        self.w = nnx.data(make(f"{name}.weight", shape, axes, hf_shape=hf_shape))
        bias_shape, self.bias_axes = shape[: self.n_out], axes[: self.n_out]
        self.b = nnx.data(
            make(f"{name}.bias", bias_shape, self.bias_axes, init="zeros", hf_shape=hf_shape[:1])
            if bias
            else None
        )

    def __call__(self, x: Float[Array, "B T *in"], rules: Rules) -> Float[Array, "B T *out"]:
        quantized = isinstance(self.w, Quantized)
        w = self.w.values if quantized else self.w
        w = gather_matrix(w, rules, self.axes, self.n_out)
        n_in = w.shape[1]
        # Of dimensions that become one, only the first is ever sharded.
        out_axes = [ACTIVATION.get(axis, axis) for axis in self.axes[: self.n_out]]
        out_axis, in_axis = (
            out_axes[0],
            ACTIVATION.get(self.axes[self.n_out], self.axes[self.n_out]),
        )
        x = jnp.reshape(x, (*x.shape[:2], n_in), out_sharding=rules.spec("batch", "time", in_axis))
        y = product(x, w, out_sharding=rules.spec("batch", "time", out_axis))
        out = rules.spec("batch", "time", *out_axes)
        y = jnp.reshape(y, (*y.shape[:2], *self.w.shape[: self.n_out]), out_sharding=out)
        if quantized:
            scale = jax.reshard(self.w.scale, rules.gathered(*self.bias_axes))
            y = (y.astype(jnp.float32) * scale).astype(y.dtype)
        y = settle_gradient(y)
        return y if self.b is None else y + jax.reshard(self.b, rules.gathered(*self.bias_axes))


@jax.custom_vjp
def settle_gradient(y: jax.Array) -> jax.Array:
    """y; on CPU its gradient is written to memory before anything uses it.

    dW = (dL/dy)ᵀ x reads dL/dy transposed. Left alone, XLA's CPU backend computes the element-wise
    operations that lead to dL/dy (of silu, say) inside that transposing copy, one strided element at a
    time: the backward pass of an MLP then takes twice as long.
    """
    return y


def _settle(_, grad: jax.Array) -> tuple[jax.Array]:
    barrier = jax.lax.optimization_barrier
    return (jax.lax.platform_dependent(grad, cpu=barrier, default=lambda grad: grad),)


settle_gradient.defvjp(lambda y: (y, None), _settle)


def make_spec(prefix: str, n_stacked: int = 0) -> MakeParam:
    """The `make` that fills a module with its ParamSpecs; `n_stacked` layers lie on a leading axis."""
    lead = (n_stacked,) if n_stacked else ()

    def make(name, shape, axes, *, init="normal", hf_shape=None) -> ParamSpec:
        stacked_axes = ("layers",) * len(lead) + tuple(axes)
        return ParamSpec(lead + tuple(shape), stacked_axes, init, prefix + name, hf_shape or shape)

    return make
