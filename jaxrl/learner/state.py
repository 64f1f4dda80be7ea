"""The train state: parameters in the compute dtype, float32 moments, float32 master weights."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array, Bool

from jaxrl.learner.optimizer import Optimizer
from jaxrl.models.spec import map_specs
from jaxrl.types import TrainState, Tree
from sharding import Rules, on_mesh, to_device, to_host
from sharding.memory import restore_memory_space


@struct.dataclass
class OptState:
    """What the optimizer keeps between updates, laid out as the parameters are."""

    inner: Tree  # optax's state: float32 moments
    master: Tree  # float32 weights where the parameters are narrower, MaskedNode where they are not
    ema: Tree = None  # float32 average of the weights, where the optimizer has one


def init_state(params: Tree, optimizer: Optimizer, *, offload: bool = False) -> TrainState:
    """The state before the first update. `params` goes into it as it is and must not be kept elsewhere:
    the first update donates it. With `offload` the optimizer's part lies with the host, and is on the
    devices only during an optimizer step."""
    opt_state = jax.jit(_init_opt, static_argnums=(1, 2))(params, optimizer, offload)
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
    """Shapes, dtypes and shardings of the state, for a restore that never holds it twice."""

    def param(spec) -> jax.ShapeDtypeStruct:
        sharding = jax.sharding.NamedSharding(mesh, rules.spec(*spec.axes))
        return jax.ShapeDtypeStruct(spec.shape, dtype, sharding=sharding)

    params = map_specs(param, specs)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        opt_state = jax.eval_shape(lambda p: _init_opt(p, optimizer), params)
        step = jax.eval_shape(lambda: jnp.zeros((), jnp.int32))
    opt_state, step = on_mesh((opt_state, step), mesh)
    return TrainState(params, to_host(opt_state) if offload else opt_state, step)


def _init_opt(params: Tree, optimizer: Optimizer, offload: bool = False) -> OptState:
    narrow = jax.tree.map(_master_of, params)
    weights = _float32(params, narrow)
    ema = (
        jax.tree.map(lambda w: jnp.copy(w.astype(jnp.float32)), weights) if optimizer.ema else None
    )
    state = OptState(optimizer.transform.init(weights), narrow, ema)
    return to_host(state) if offload else state


def apply_gradients(
    state: TrainState, grads: Tree, optimizer: Optimizer, *, keep: Bool[Array, ""]
) -> TrainState:
    """One optimizer step in float32 on the master weights; the parameters are their rounding. The average
    of the weights, where one is kept, becomes ema * average + (1 - ema) * weights
    (https://doi.org/10.1137/0330046).

    Where `keep` is true everything stays as it was (a gradient that is not finite must not spoil it).
    """
    before = state.opt_state  # lies with the host where the run offloads it
    state = dataclasses.replace(state, opt_state=to_device(before))
    old = _float32(state.params, state.opt_state.master)
    updates, inner = optimizer.transform.update(grads, state.opt_state.inner, old)
    new = optax.apply_updates(old, updates)
    params = jax.tree.map(lambda p, w: w.astype(p.dtype), state.params, new)
    master = jax.tree.map(
        lambda p, m, w: m if isinstance(m, optax.MaskedNode) else w,
        state.params,
        state.opt_state.master,
        new,
    )
    ema, kept = state.opt_state.ema, optimizer.ema
    if kept:
        ema = jax.tree.map(lambda e, w: kept * e + (1.0 - kept) * w.astype(e.dtype), ema, new)
    stepped = TrainState(params, OptState(inner, master, ema), state.step + 1)
    state = jax.tree.map(lambda was, now: jnp.where(keep, was, now), state, stepped)
    return dataclasses.replace(state, opt_state=restore_memory_space(state.opt_state, before))


def averaged(state: TrainState) -> Tree:
    """The average of the weights as a model, in the policy's dtype."""
    average = to_device(state.opt_state.ema)
    return jax.tree.map(lambda p, e: e.astype(p.dtype), state.params, average)


def _master_of(param: jax.Array):
    wide = param.dtype.itemsize >= 4
    return optax.MaskedNode() if wide else param.astype(jnp.float32)


def _float32(params: Tree, master: Tree) -> Tree:
    """The weights that the optimizer works on."""
    return jax.tree.map(lambda p, m: p if isinstance(m, optax.MaskedNode) else m, params, master)
