"""Linear map with its weight stored as [out, in], as in Hugging Face files."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxrl.kernels.bits import materialize
from jaxrl.kernels.matmul import Weight, matmul, matmuls
from jaxrl.kernels.nf4 import NF4
from jaxrl.kernels.quantized import Quantized
from jaxrl.kernels.quantized_matmul import quantized_matmul
from jaxrl.models.config import LoRA, target_name
from jaxrl.models.layers.limits import Limits
from jaxrl.models.layers.stored import (
    QUANTIZED,
    MakeParam,
    Stored,
    dense,
    gather_stored,
    make_stored,
)
from jaxrl.models.spec import ParamSpec
from sharding import Rules, gather_matrix, gather_residual, scatter_residual

# Weight axes whose activations have another logical axis.
ACTIVATION_AXES: dict[str | None, str] = {"w_embed": "embed"}


class Adapter(nnx.Module):
    """The low-rank change of a linear layer, scale B A x: A is [rank, *in], B is [*out, rank].

    With a magnitude m [*out], the layer's output is also multiplied by m / ||W + scale B A||, where
    the norm is that of an output's weights (DoRA, https://arxiv.org/abs/2402.09353, equation 5).

    With a start A0, B0, the change is scale (B A - B0 A0) x. A and B start at these, the principal
    part of W, and so the change at zero (PiSSA, https://arxiv.org/abs/2404.02948, which subtracts
    scale B0 A0 from W instead; here W stays that of the base model).

    With `n_stacked` it has several adapters, one after the other along the rank of A and B, and
    every token uses the one that `ids` names (models/adapter_stack.py). `gains` [1 + n, *out] are
    then their m / ||W + scale B A||, computed in advance; 1 for the base and without a magnitude.
    """

    def __init__(
        self,
        make: MakeParam,
        name: str,
        lora: LoRA,
        shape: tuple[int, ...],
        axes: tuple[str | None, ...],
        *,
        n_out: int,
        hf_shape: tuple[int, int],
    ):
        self.scale, self.n_out = lora.scale, n_out
        self.a_axes, self.b_axes = (None, *axes[n_out:]), (*axes[:n_out], None)
        self.n_stacked = lora.n_stacked
        self.ids: Int[Array, "B T"] | None = nnx.data(None)  # 0 = none, i = the i-th adapter
        rank = lora.rank * max(lora.n_stacked, 1)
        a_shape, b_shape = (rank, *shape[n_out:]), (*shape[:n_out], rank)
        out, into = hf_shape

        def pair(kind: str) -> tuple[Any, Any]:
            part, (a_hf, b_hf) = f"{name}.lora_%s{kind}.weight", ((rank, into), (out, rank))
            a = make(part % "A", a_shape, self.a_axes, init="lora_a", hf_shape=a_hf)
            b = make(part % "B", b_shape, self.b_axes, init="zeros", hf_shape=b_hf)
            return a, b

        self.a, self.b = map(nnx.data, pair(""))
        self.a0, self.b0 = map(nnx.data, pair("_start") if lora.pissa else (None, None))
        self.m, self.gains = nnx.data(None), nnx.data(None)
        if lora.dora and lora.n_stacked:
            gains, n = f"{name}.lora_gains", 1 + lora.n_stacked
            sizes, gain_axes = (n, *shape[:n_out]), (None, *axes[:n_out])
            made = make(gains, sizes, gain_axes, init="ones", hf_shape=(n, out), dtype="float32")
            self.gains = nnx.data(made)
        elif lora.dora:
            magnitude = f"{name}.lora_magnitude_vector"
            made = make(magnitude, shape[:n_out], axes[:n_out], init="ones", hf_shape=(out,))
            self.m = nnx.data(made)

    def change(
        self, x: Float[Array, "B T I"], out_axis: str | None, rules: Rules
    ) -> Float[Array, "B T O"]:
        """scale B A x, of the linear layer's input as a matrix."""

        def product(a: jax.Array, b: jax.Array) -> jax.Array:
            a = gather_matrix(a, rules, self.a_axes, 1)
            b = gather_matrix(b, rules, self.b_axes, self.n_out)
            low = matmul(x, a, out_sharding=rules.spec("batch", "time", None))
            low = own_part(low, self.ids, self.n_stacked)
            return matmul(low, b, out_sharding=rules.spec("batch", "time", out_axis))

        y = product(self.a, self.b)
        if self.a0 is not None and self.b0 is not None:
            # Two equal products differ by exactly zero; that of concatenated factors would not.
            y = y - product(self.a0, self.b0)
        return y * jnp.asarray(self.scale, y.dtype)

    def token_gains(self, out: jax.P, rules: Rules) -> Float[Array, "B T *out"]:
        """The gains of each token's adapter, sharded by `out`."""
        gains = jax.reshard(self.gains, rules.gathered(None, *self.b_axes[:-1]))
        return gains.at[self.ids].get(mode="clip", out_sharding=out)

    def factors(self) -> tuple[jax.Array, jax.Array]:
        """(A, B) of the whole change: with a start, [A; A0] and [B, -B0]."""
        if self.a0 is None or self.b0 is None:
            return self.a, self.b
        a = jnp.concatenate([self.a, self.a0], axis=-len(self.a_axes))
        return a, jnp.concatenate([self.b, -self.b0], axis=-1)


def own_part(
    low: Float[Array, "*tokens R"], ids: Int[Array, "*tokens"] | None, n_stacked: int
) -> Float[Array, "*tokens R"]:
    """A x of each token's own adapter among `n_stacked`; zeros in place of the others.

    Without a stack (`n_stacked` 0), A x itself.
    """
    if not n_stacked:
        return low
    assert ids is not None, "choose_adapters sets the adapter of every token"
    owner = 1 + np.repeat(np.arange(n_stacked), low.shape[-1] // n_stacked)
    return jnp.where(ids[..., None] == owner, low, 0)


class Linear(nnx.Module):
    """y = x Wᵀ + b, plus the change of an adapter if it has one.

    `eq` is the einsum of (x, W), with W's dimensions ordered out, in. If it is `clipped`, x and y
    are limited to ranges (limits.py).

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
        bias: bool = False,
        lora: LoRA | None = None,
        base_dtype: str = "",
        blocks: tuple[int, ...] = (),
        clipped: bool = False,
    ):
        if blocks:  # of the rows of every [out, in] and [out] in the file
            make = in_blocks(make, blocks)
        x_dims, rest = eq.split(",")
        w_dims, out_dims = rest.split("->")
        self.n_out = sum(d not in x_dims for d in w_dims)
        if not (w_dims == out_dims[2:] + x_dims[2:] and x_dims[:2] == out_dims[:2] == "BT"):
            raise ValueError(f"{eq!r} is not a [B, T, in] x [out, in] product")
        hf_shape = math.prod(shape[: self.n_out]), math.prod(shape[self.n_out :])
        self.name, self.axes = name, axes
        self.matmul_dtype = "auto"  # of the product; packed.with_matmul_dtype sets another one
        n_in = len(shape) - self.n_out
        w = make_stored(make, name, shape, axes, n_in=n_in, hf_shape=hf_shape, dtype=base_dtype)
        self.w: Stored = nnx.data(w)
        self.gathered: Stored | None = nnx.data(None)  # what `gather` sets
        bias_shape, self.bias_axes = shape[: self.n_out], axes[: self.n_out]
        b = None
        if bias:
            hf_bias = hf_shape[:1]
            b = make(f"{name}.bias", bias_shape, self.bias_axes, init="zeros", hf_shape=hf_bias)
        self.b, self.scanned = nnx.data(b), b is not None and len(b.layers) > 0
        change = None
        if lora is not None and target_name(name) in lora.targets:
            change = Adapter(make, name, lora, shape, axes, n_out=self.n_out, hf_shape=hf_shape)
        self.lora: Adapter | None = nnx.data(change)
        self.limits: Limits | None = Limits(make, name) if clipped else None

    def __call__(self, x: Float[Array, "B T *in"], rules: Rules) -> Float[Array, "B T *out"]:
        return apply_linears(x, self, rules=rules)[0]

    def matrix(self, w: Stored, dtype: DTypeLike, rules: Rules) -> Weight:
        """`self.w` as a matrix [out, in], gathered over the axes that shard only parameters (FSDP).

        int8 stays int8, without its scales; nf4 is dequantized to `dtype`.
        """
        if not isinstance(w, QUANTIZED):
            whole = self.gathered is not None
            return w if whole else gather_matrix(w, rules, self.axes, self.n_out)
        w = gather_stored(w, rules, self.axes, len(self.axes) - self.n_out)
        values = w.values if isinstance(w, Quantized) else dense(w, dtype)
        flat = rules.gathered(self.axes[0], self.axes[self.n_out])
        into = math.prod(values.shape[self.n_out :])
        return jnp.reshape(values, (-1, into), out_sharding=flat)

    def gather(self, rules: Rules) -> "Linear":
        """The same map with its weight gathered once, for several products."""
        new, n_in = jax.tree.map(lambda leaf: leaf, self), len(self.axes) - self.n_out
        if isinstance(self.w, QUANTIZED):
            new.gathered = gather_stored(self.w, rules, self.axes, n_in)
        else:
            new.gathered = gather_matrix(self.w, rules, self.axes, self.n_out)
        return new

    def finish(
        self, x: Float[Array, "B T I"], y: Float[Array, "B T O"], rules: Rules
    ) -> Float[Array, "B T *out"]:
        """The output, of which y = x Wᵀ is the largest part, in its dimensions.

        The rest is the scale of a quantized weight, the adapter and the bias.
        """
        shape = (*y.shape[:2], *self.w.shape[: self.n_out])
        if self.out_axes[0] == "embed":
            out = rules.residual_spec(shape)
            partial = self.product_spec(rules) == rules.partial_residual()
            y = scatter_residual(y, rules) if partial else jax.reshard(y, out)
        else:
            out = rules.spec("batch", "time", *self.out_axes)
            if self.lora is None and not isinstance(self.w, Quantized) and not self.scanned:
                return jnp.reshape(self._with_bias(y, rules), shape, out_sharding=out)
            y = jnp.reshape(y, shape, out_sharding=out)
        if isinstance(self.w, Quantized):
            scale = jax.reshard(self.w.scale, rules.gathered(*self.bias_axes))
            y = (y.astype(jnp.float32) * scale).astype(y.dtype)
        if self.lora is not None:
            x = jax.reshard(x, rules.spec("batch", "time", self.in_axis))
            change = self.lora.change(x, self.out_axes[0], rules)
            whole = rules.spec("batch", "time", *self.out_axes)
            y = y + jax.reshard(jnp.reshape(change, shape, out_sharding=whole), out)
            if self.lora.m is not None:
                y = (y.astype(jnp.float32) * self.gain(rules)).astype(y.dtype)
            if self.lora.gains is not None:
                gains = jax.reshard(self.lora.token_gains(whole, rules), out)
                y = (y.astype(jnp.float32) * gains).astype(y.dtype)
        y = materialize_gradient(y)
        return y if self.b is None else y + jax.reshard(self.b, rules.gathered(*self.bias_axes))

    def _with_bias(self, y: Float[Array, "B T O"], rules: Rules) -> Float[Array, "B T O"]:
        """x Wᵀ + b before it gets its dimensions: on GPU the product then adds the bias.

        In a scan over layers such a product would first copy the layer's weight.
        """
        y = materialize_gradient(y)
        if self.b is None:
            return y
        b = jax.reshard(self.b, rules.gathered(*self.bias_axes))
        return y + jnp.reshape(b, -1, out_sharding=rules.gathered(self.bias_axes[0]))

    def gain(self, rules: Rules) -> Float[Array, "*out"]:
        """m / ||W + scale B A|| of every output, float32; for an adapter with magnitudes.

        The norm is a constant in the gradient (section 4.3 of the paper). Its square is
        ||W||² + (2 scale W Aᵀ + scale² B A Aᵀ)·B, per output: no other [out, in] array is made, and
        the shards of W stay where they are.
        """
        lora, n_in = self.lora, len(self.axes) - self.n_out
        assert lora is not None
        w, (a, b) = self.w, lora.factors()
        if isinstance(w, QUANTIZED):
            w = dense(gather_stored(w, rules, self.axes, n_in), jnp.float32)
        w, a, b = (
            jax.lax.stop_gradient(jax.reshard(x, rules.spec(*axes))).astype(jnp.float32)
            for x, axes in ((w, self.axes), (a, lora.a_axes), (b, lora.b_axes))
        )
        out, into = "OPQ"[: self.n_out], "IJK"[:n_in]
        b_spec = rules.spec(*lora.b_axes)
        wa = jnp.einsum(f"{out}{into},R{into}->{out}R", w, a, out_sharding=b_spec)
        aa = jnp.einsum(f"R{into},S{into}->RS", a, a, out_sharding=jax.P(None, None))
        baa = jnp.einsum(f"{out}R,RS->{out}S", b, aa, out_sharding=b_spec)
        cross = jnp.sum(materialize((2 * lora.scale * wa + lora.scale**2 * baa) * b), axis=-1)
        square = jnp.sum(materialize(w * w), axis=tuple(range(self.n_out, w.ndim))) + cross
        norm = jax.reshard(jnp.sqrt(square), rules.gathered(*self.bias_axes))
        return jax.reshard(lora.m, rules.gathered(*self.bias_axes)).astype(jnp.float32) / norm

    @property
    def out_axes(self) -> list[str | None]:
        """Logical axes of the output."""
        return [ACTIVATION_AXES.get(axis, axis) for axis in self.axes[: self.n_out]]

    def product_spec(self, rules: Rules) -> jax.P:
        """PartitionSpec of x Wᵀ."""
        sharded = self.in_axis is not None  # so that every device has a part of the sum
        if self.out_axes[0] == "embed" and sharded and self.matmul_dtype == "auto":
            return rules.partial_residual()
        return rules.spec("batch", "time", self.out_axes[0])

    @property
    def in_axis(self) -> str | None:
        """Logical axis of the input; of merged dimensions, only the first is ever sharded."""
        axis = self.axes[self.n_out]
        return ACTIVATION_AXES.get(axis, axis)


def apply_linears(
    x: Float[Array, "B T *in"], *linears: Linear, rules: Rules
) -> list[Float[Array, "B T ..."]]:
    """Several linear maps of the same x; the decode kernel reads their weights in one call.

    The outputs of all of them are sharded, or those of none. Layers with limits are computed one
    by one, because each has its own inputs.
    """
    first, *others = linears
    if others and any(linear.limits is not None for linear in linears):
        return [linear(x, rules) for linear in linears]
    if (limits := first.limits) is not None:
        x = limits.clip_input(x)
    kind = linears[0].matmul_dtype
    if linears[0].in_axis == "embed":
        # Scales multiply whole sums: quantized products leave none to the residual stream. Outputs
        # that no axis shards are whole on every device, and so are the gradients of x.
        plain = rules.spec("batch", "time", "embed")
        partial = kind == "auto" and linears[0].out_axes[0] is not None
        inputs = gather_residual(x, rules) if partial else jax.reshard(x, plain)
    else:
        x_spec = rules.spec("batch", "time", linears[0].in_axis)
        x = jnp.reshape(x, (*x.shape[:2], math.prod(x.shape[2:])), out_sharding=x_spec)
        inputs = x
    outs = [linear.product_spec(rules) for linear in linears]

    def multiply(x: jax.Array, stored: Sequence[Stored]) -> list[jax.Array]:
        if any(isinstance(w, NF4) for w in stored):
            # Tied to x: XLA would otherwise hoist the dequantized weights out of decode's loop.
            x, stored = jax.lax.optimization_barrier((x, stored))
        pairs = zip(linears, stored, strict=True)
        weights = [linear.matrix(w, x.dtype, rules) for linear, w in pairs]
        if kind != "auto":
            pairs = zip(weights, outs, strict=True)
            return [quantized_matmul(x, w, kind, out) for w, out in pairs]
        return matmuls(x, weights, out_shardings=outs)

    stored = [linear.w if linear.gathered is None else linear.gathered for linear in linears]
    if any(isinstance(w, QUANTIZED) for w in stored):
        multiply = jax.checkpoint(multiply)  # backward must not keep weights in the dtype of x
    ys = multiply(inputs, stored)
    finished = [linear.finish(x, y, rules) for linear, y in zip(linears, ys, strict=True)]
    return finished if limits is None else [limits.clip_output(finished[0])]


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


def make_spec(prefix: str, layers: range = range(0)) -> MakeParam:
    """The `make` that fills a module with ParamSpecs; stacked `layers` get a leading axis."""
    leading = (len(layers),) if layers else ()

    def make(
        name, shape, axes, *, init="normal", hf_shape=None, dtype=None, blocks=()
    ) -> ParamSpec:
        stacked_axes = ("layers",) * len(leading) + tuple(axes)
        sizes, hf = leading + tuple(shape), prefix + name
        return ParamSpec(sizes, stacked_axes, init, hf, hf_shape or shape, dtype, layers, blocks)

    return make


def in_blocks(make: MakeParam, blocks: tuple[int, ...]) -> MakeParam:
    """`make`, with these blocks of rows for all parts of a linear layer whose rows are outputs."""

    def make_part(name, shape, axes, **options) -> Any:
        has_outputs = not name.endswith(("lora_A.weight", "lora_A_start.weight", "lora_gains"))
        return make(name, shape, axes, **options, blocks=blocks if has_outputs else ())

    return make_part
