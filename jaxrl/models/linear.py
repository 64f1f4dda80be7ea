"""A linear map whose weight lies [out, in], as in Hugging Face files."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxrl.models.spec import ParamSpec
from sharding import Rules

MakeParam = Callable[..., Any]  # (suffix, shape, axes, init=, hf_shape=) -> leaf


class Linear(nnx.Module):
    """y = x Wᵀ + b. `eq` is the einsum of (x, W); W may have more than two dimensions."""

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
        self.eq, self.axes = eq, axes
        x_dims, rest = eq.split(",")
        w_dims, out_dims = rest.split("->")
        out_axes = dict(zip(w_dims, axes, strict=True)) | {"B": "batch", "T": "time", "D": "embed"}
        self.out_axes = tuple(out_axes[d] for d in out_dims)
        self.w = nnx.data(make(f"{name}.weight", shape, axes, hf_shape=hf_shape))
        free = [i for i, d in enumerate(w_dims) if d not in x_dims]
        bias_shape = tuple(shape[i] for i in free)
        self.bias_axes = tuple(axes[i] for i in free)
        self.b = nnx.data(
            make(f"{name}.bias", bias_shape, self.bias_axes, init="zeros", hf_shape=hf_shape[:1])
            if bias
            else None
        )

    def __call__(self, x: Float[Array, "B T *in"], rules: Rules) -> Float[Array, "B T *out"]:
        w = jax.reshard(self.w, rules.gathered(*self.axes))
        y = jnp.einsum(self.eq, x, w, out_sharding=rules.spec(*self.out_axes))
        return y if self.b is None else y + jax.reshard(self.b, rules.gathered(*self.bias_axes))


def make_spec(prefix: str, n_stacked: int = 0) -> MakeParam:
    """The `make` that fills a module with its ParamSpecs; `n_stacked` layers lie on a leading axis."""
    lead = (n_stacked,) if n_stacked else ()

    def make(name, shape, axes, *, init="normal", hf_shape=None) -> ParamSpec:
        stacked_axes = (None,) * len(lead) + tuple(axes)
        return ParamSpec(lead + tuple(shape), stacked_axes, init, prefix + name, hf_shape or shape)

    return make
