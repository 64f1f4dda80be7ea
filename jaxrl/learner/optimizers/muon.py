"""Muon: orthogonalized momentum for the matrices of the layers, AdamW for all other tensors."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxrl.config.keys.optimizer import MuonOptions
from jaxrl.learner.optimizers.newton_schulz import orthogonalize
from jaxrl.models.spec import ParamSpec, is_spec, map_specs
from jaxrl.models.vision.names import is_of_tower
from jaxrl.types import Tree
from sharding import target_platform


class MuonState(NamedTuple):
    mu: Tree  # float32 momentum


def is_hidden_matrix(spec: ParamSpec) -> bool:
    """True for matrices inside the layers; embedding, heads, norms, biases, a tower's are none."""
    return spec.is_matrix and ".layers." in spec.hf and not is_of_tower(spec.hf)


def scale_by_muon(specs: Tree, options: MuonOptions) -> optax.GradientTransformation:
    """Muon's update of matrices (https://kellerjordan.github.io/posts/muon).

    m = momentum m + (1 - momentum) g
    d = momentum m + (1 - momentum) g if nesterov, else m
    u = f NewtonSchulz(d), with f by the shape [rows, columns] of the matrix:
    scale="shape": sqrt(max(1, rows / columns)), as in https://github.com/KellerJordan/Muon
    scale="rms": 0.2 sqrt(max(rows, columns)), which gives an update the root mean square of
    AdamW's (https://arxiv.org/abs/2502.16982, equation 4).
    `specs` has MaskedNode in place of tensors that are not to be updated.
    """

    def init(params: Tree) -> MuonState:
        return MuonState(jax.tree.map(jnp.zeros_like, params))

    def update(grads: Tree, state: MuonState, params: Tree | None = None):
        beta = options.momentum

        def average(m: jax.Array, g: jax.Array) -> jax.Array:
            return beta * m + (1.0 - beta) * g

        mu = jax.tree.map(average, state.mu, grads)
        directions = jax.tree.map(average, mu, grads) if options.nesterov else mu
        leaves, treedef = jax.tree.flatten(directions)
        table = jax.tree.leaves(specs, is_leaf=is_spec)
        dtype = iteration_dtype(options)
        whole = orthogonalize(leaves, table, steps=options.steps, dtype=dtype)
        updates = [
            shape_factor(spec, options.scale) * u.astype(jnp.float32)
            for spec, u in zip(table, whole, strict=True)
        ]
        return jax.tree.unflatten(treedef, updates), MuonState(mu)

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


def split_specs(specs: Tree) -> tuple[Tree, Tree, Tree]:
    """(Muon's matrices, the other tensors, "muon" or "adamw" for each); MaskedNode elsewhere."""

    def only(wanted: bool) -> Tree:
        return map_specs(
            lambda s: s if is_hidden_matrix(s) == wanted else optax.MaskedNode(), specs
        )

    names = map_specs(lambda spec: "muon" if is_hidden_matrix(spec) else "adamw", specs)
    return only(True), only(False), names


def shape_factor(spec: ParamSpec, scale: str) -> float:
    rows, cols = spec.hf_shape
    if scale == "rms":
        return 0.2 * math.sqrt(max(rows, cols))
    return math.sqrt(max(1.0, rows / cols))


def iteration_dtype(options: MuonOptions) -> jnp.dtype:
    auto = "float32" if target_platform() == "cpu" else "bfloat16"
    return jnp.dtype(auto if options.dtype == "auto" else options.dtype)
