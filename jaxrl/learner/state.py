"""Train state: parameters in the compute dtype, optimizer state and float32 master weights."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array, Bool, Float

from jaxrl.learner.optimizer import Optimizer
from jaxrl.learner.optimizers.layerwise import layer_blocks, step_in_parts
from jaxrl.learner.optimizers.rounding import round_tree
from jaxrl.learner.zero import as_sharded
from jaxrl.models.lora import checkpoint_part, combine, split
from jaxrl.models.spec import abstract_params
from jaxrl.runtime.flat_program import FlatTree, unflatten
from jaxrl.types import TrainState, Tree
from sharding import Rules, is_on_host, on_mesh, restore_memory_space, to_device, to_host


@struct.dataclass
class OptState:
    """Optimizer state, sharded like the parameters, or also over replicas (zero.py)."""

    # Each for the arrays that training changes: with adapters, only these (models/lora.py).
    inner: Tree  # optax's state: moments
    master: Tree  # float32 weights of narrower parameters; MaskedNode for those without
    ema: Tree = None  # float32 moving average of the weights, if the optimizer keeps one


def init_state(params: Tree, optimizer: Optimizer, *, offload: bool = False) -> TrainState:
    """The state before the first update.

    The state takes `params` over without a copy; drop other references, because the first update
    donates it. `offload` keeps the optimizer state in host memory, except during an optimizer step.
    """
    opt_state = jax.jit(init_opt_state, static_argnums=(1, 2))(params, optimizer, offload)
    return TrainState(params=params, opt_state=opt_state, step=jnp.zeros((), jnp.int32))


def abstract_state(
    specs: Tree,
    dtype: jnp.dtype,
    optimizer: Optimizer,
    rules: Rules,
    mesh: jax.sharding.Mesh,
    *,
    offload: bool = False,
) -> TrainState:
    """Shapes, dtypes and shardings of the state, to restore a checkpoint without a second copy."""
    params = abstract_params(specs, rules, dtype, mesh)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        opt_state = jax.eval_shape(lambda p: init_opt_state(p, optimizer), params)
        step = jax.eval_shape(lambda: jnp.zeros((), jnp.int32))
    opt_state, step = on_mesh((opt_state, step), mesh)
    return TrainState(params, to_host(opt_state) if offload else opt_state, step)


def init_opt_state(params: Tree, optimizer: Optimizer, offload: bool = False) -> OptState:
    """Optimizer state, master weights and moving average before the first update."""
    params = optimizer.zero.shard(split(params)[0])
    master = jax.tree.map(functools.partial(_master_weight, keep=optimizer.master), params)
    weights = _float32(params, master)
    ema = (
        jax.tree.map(lambda w: jnp.copy(w.astype(jnp.float32)), weights) if optimizer.ema else None
    )
    state = OptState(optimizer.transform.init(weights), master, ema)
    return to_host(state) if offload else state


def apply_gradients(
    state: TrainState,
    grads: Tree,
    optimizer: Optimizer,
    *,
    keep: Bool[Array, ""],
    factor: Float[Array, ""] | float = 1.0,
) -> TrainState:
    """One optimizer step in float32 on the master weights; the parameters are rounded from them.

    The gradient is factor * grads; a step by layer needs no second copy of it.

    Without master weights the step starts from the parameters, which are rounded stochastically
    (rounding.py). `state` and `grads` have only the parameters that training changes.

    A moving average of the weights, if kept, becomes ema * average + (1 - ema) * weights
    (https://doi.org/10.1137/0330046). If `keep` is true the state is left unchanged (non-finite
    gradient).

    With state or gradients in host memory the step runs layer by layer, with int8 moments and Muon
    in blocks of layers (layerwise.py), unless layers depend on each other (`Optimizer.recipe`).
    """
    step = functools.partial(_step, optimizer=optimizer, keep=keep, factor=factor)
    offloaded = any(map(is_on_host, jax.tree.leaves((state.opt_state, grads))))
    recipe = optimizer.recipe
    if recipe is None or not recipe.is_divisible(state.params):
        return restore_memory_space(step(state, grads, optimizer.transform), state)
    if offloaded or recipe.needs_blocks:
        n_blocks = layer_blocks(state.params, single=offloaded)
        return step_in_parts(state, grads, recipe, step, n_blocks=n_blocks)
    return step(state, grads, optimizer.transform)


def _step(
    state: TrainState,
    grads: Tree,
    transform: optax.GradientTransformation,
    *,
    optimizer: Optimizer,
    keep: Bool[Array, ""],
    factor: Float[Array, ""] | float,
) -> TrainState:
    """`apply_gradients` of all parameters or some, with the new state on the device.

    `transform` is `optimizer`'s for these parameters.
    """
    state, grads = to_device((state, grads))
    # With ZeRO every replica updates its shards, and gathers the others' shards at the end.
    shared, grads = optimizer.zero.shard((state.params, grads))
    grads = jax.tree.map(lambda g: g * factor, grads)
    old = _float32(shared, state.opt_state.master)
    updates, inner = transform.update(grads, state.opt_state.inner, old)
    new = optax.apply_updates(old, updates)
    if optimizer.master:
        params = jax.tree.map(lambda p, w: w.astype(p.dtype), state.params, new)
    else:
        params = round_tree(new, state.params, state.step)
    params = as_sharded(params, state.params)
    master = jax.tree.map(
        lambda p, m, w: m if isinstance(m, optax.MaskedNode) else w,
        state.params,
        state.opt_state.master,
        new,
    )
    ema, decay = state.opt_state.ema, optimizer.ema
    if decay:
        ema = jax.tree.map(lambda e, w: decay * e + (1.0 - decay) * w.astype(e.dtype), ema, new)
    stepped = TrainState(params, OptState(inner, master, ema), state.step + 1)
    return jax.tree.map(lambda was, now: jnp.where(keep, was, now), state, stepped)


def averaged(state: TrainState) -> Tree:
    """The moving average of the weights, as parameters in the policy's dtype."""
    trained, frozen = split(state.params)
    average = as_sharded(to_device(unflatten(state.opt_state).ema), trained)
    return combine(jax.tree.map(lambda p, e: e.astype(p.dtype), trained, average), frozen)


def trained_arrays(model: FlatTree) -> FlatTree:
    """The part of a model that an update changes, as `split` gives it, without a walk per call."""
    places, structure = _trained_places(model.structure)
    return FlatTree((model.leaves[i] for i in places), structure)


def with_trained(model: FlatTree, trained: FlatTree, others: Mapping[int, jax.Array]) -> Tree:
    """The tree of a model with new arrays in the places of `trained_arrays`, and `others`."""
    leaves = [others.get(i, leaf) for i, leaf in enumerate(model.leaves)]
    for i, leaf in zip(_trained_places(model.structure)[0], trained.leaves, strict=True):
        leaves[i] = leaf
    return jax.tree.unflatten(model.structure, leaves)


@functools.lru_cache
def _trained_places(structure: Any) -> tuple[tuple[int, ...], Any]:
    """(places of trained leaves among those of a model, structure of the trained part)."""
    trained, _ = split(jax.tree.unflatten(structure, range(structure.num_leaves)))
    places, part = jax.tree.flatten(trained)
    return tuple(places), part


def checkpoint_state(state: TrainState) -> TrainState:
    """The state without the parameters that a resumed run reads from the model's folder."""
    params, opt_state = checkpoint_part(state.params), unflatten(state.opt_state)
    return dataclasses.replace(state, params=params, opt_state=opt_state)


def _master_weight(param: jax.Array, *, keep: bool):
    wide = param.dtype.itemsize >= 4
    return optax.MaskedNode() if wide or not keep else param.astype(jnp.float32)


def _float32(params: Tree, master: Tree) -> Tree:
    """The float32 weights that the optimizer updates."""

    def one(param: jax.Array, master: Any) -> jax.Array:
        return param.astype(jnp.float32) if isinstance(master, optax.MaskedNode) else master

    return jax.tree.map(one, params, master)
