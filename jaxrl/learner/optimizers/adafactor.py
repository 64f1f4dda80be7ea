"""Adafactor: second moments of a matrix from the means of its rows and columns."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxrl.config.keys.optimizer import AdafactorOptions
from jaxrl.models.spec import ParamSpec, map_specs
from jaxrl.types import Array, Tree

EPSILON = 1e-30  # added to squared gradients
MIN_SCALE = 1e-3  # of the weights' root mean square


class FactoredState(NamedTuple):
    """A parameter has `rows` and `cols`, or `full`; MaskedNode stands for what it lacks."""

    count: Array  # int32 []
    rows: Tree  # float32, the parameter's shape without the axes of columns
    cols: Tree  # float32, the parameter's shape without the axes of rows
    full: Tree  # float32, the parameter's shape


def scale_by_adafactor(specs: Tree, options: AdafactorOptions) -> optax.GradientTransformation:
    """Adafactor's update of every tensor (https://arxiv.org/abs/1804.04235, algorithms 4 and 5).

    b_t = 1 - t^-decay_rate
    rows = b_t rows + (1 - b_t) mean over columns (g^2 + 1e-30), and cols likewise
    u = g / sqrt(rows cols / mean(rows))
    u / max(1, rms(u) / clipping_threshold), times max(1e-3, rms(weights)) if
    multiply_by_parameter_scale.
    The equations of optax.adafactor, which would factor the two longest axes of an array: here they
    hold for each matrix of the Hugging Face file, so stacked layers, experts and separate heads
    change nothing. Statistics are sharded like the parameter.
    """

    def init(params: Tree) -> FactoredState:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return FactoredState(
            jnp.zeros((), jnp.int32),
            map_specs(lambda s, p: row_means(s, p, options), specs, zeros),
            map_specs(lambda s, p: col_means(s, p, options), specs, zeros),
            map_specs(lambda s, p: full_squares(s, p, options), specs, zeros),
        )

    def update(grads: Tree, state: FactoredState, params: Tree | None = None):
        decay = 1.0 - (state.count + 1.0) ** -options.decay_rate
        squares = jax.tree.map(lambda g: g * g + EPSILON, grads)

        def averaged(means, old: Tree) -> Tree:
            new = map_specs(lambda s, sq: means(s, sq, options), specs, squares)
            return jax.tree.map(lambda o, n: decay * o + (1.0 - decay) * n, old, new)

        rows, cols = averaged(row_means, state.rows), averaged(col_means, state.cols)
        full = averaged(full_squares, state.full)
        updates = map_specs(_precondition, specs, grads, rows, cols, full)
        updates = map_specs(lambda s, u: clip(s, u, options.clipping_threshold), specs, updates)
        if options.multiply_by_parameter_scale:
            updates = map_specs(
                lambda s, u, p: u * jnp.maximum(_rms(s, p), MIN_SCALE), specs, updates, params
            )
        return updates, FactoredState(state.count + 1, rows, cols, full)

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


def is_factored(spec: ParamSpec, options: AdafactorOptions) -> bool:
    return spec.is_matrix and min(spec.hf_shape) >= options.min_dim_size_to_factor


def row_means(spec: ParamSpec, x: jax.Array, options: AdafactorOptions):
    """Means over the columns; MaskedNode if the tensor is not factored."""
    if not is_factored(spec, options):
        return optax.MaskedNode()
    return jnp.mean(x, axis=spec.matrix_axes[1])


def col_means(spec: ParamSpec, x: jax.Array, options: AdafactorOptions):
    """Means over the rows; MaskedNode if the tensor is not factored."""
    if not is_factored(spec, options):
        return optax.MaskedNode()
    return jnp.mean(x, axis=spec.matrix_axes[0])


def full_squares(spec: ParamSpec, x: jax.Array, options: AdafactorOptions):
    """`x` itself; MaskedNode if the tensor is factored."""
    return optax.MaskedNode() if is_factored(spec, options) else x


def clip(spec: ParamSpec, update: jax.Array, threshold: float) -> jax.Array:
    """The update with a root mean square of at most `threshold` in every tensor."""
    return update / jnp.maximum(1.0, _rms(spec, update) / threshold)


def _precondition(spec: ParamSpec, grad: jax.Array, rows, cols, full) -> jax.Array:
    if not isinstance(full, optax.MaskedNode):
        return grad * jax.lax.rsqrt(full)
    out, into = spec.matrix_axes
    mean = jnp.mean(rows, axis=out, keepdims=True)
    by_row = jnp.expand_dims(jax.lax.rsqrt(rows / mean), into)
    return grad * by_row * jnp.expand_dims(jax.lax.rsqrt(cols), out)


def _rms(spec: ParamSpec, x: jax.Array) -> jax.Array:
    """Root mean square of each tensor, with axes of size 1."""
    axes = tuple(range(len(spec.stacked_shape), x.ndim))
    return jnp.sqrt(jnp.mean(x * x, axis=axes, keepdims=True))
