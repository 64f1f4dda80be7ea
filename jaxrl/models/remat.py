"""Activations that the backward pass keeps: policies of `jax.checkpoint` by name."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxrl.config.remat import LayerRange, Remat
from jaxrl.kernels.attention_spec import SAVED_NAME as ATTENTION
from jaxrl.types import Tree
from sharding.tree import HOST_MEMORY_KIND

LAYER_INPUT = "layer_input"
# Activations that the backward pass keeps next to the layer inputs. They have names where they are
# made, so that a policy holds for any sharding: "o" is the sum over the devices of a tensor axis.
SAVED = {
    "full": (),
    "attention": (ATTENTION,),
    "mlp": ("gate_up", ATTENTION),
    "dots": ("qkv", ATTENTION, "o", "gate_up", "down"),
}
REMAT_POLICIES: dict[str, Callable[..., Any] | None] = {
    name: jax.checkpoint_policies.save_only_these_names(*names) for name, names in SAVED.items()
} | {
    "offload": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[LAYER_INPUT],
        offload_src="device",
        offload_dst=HOST_MEMORY_KIND,
    ),
    "none": None,
}
Carry = tuple[jax.Array, Any]  # (input of a layer, state)


def recompute(
    run: Callable[..., Any], policy: str, static_argnums: tuple[int, ...] = ()
) -> Callable[..., Any]:
    """`run`, whose backward pass recomputes what the policy does not keep."""
    if policy == "none":
        return run
    return jax.checkpoint(run, policy=REMAT_POLICIES[policy], static_argnums=static_argnums)


def layer_input(x: jax.Array, policy: str) -> jax.Array:
    """Identity, which gives the input of a layer the name that "offload" knows it by."""
    return checkpoint_name(x, LAYER_INPUT) if policy == "offload" else x


def scan_remat(
    step: Callable[[str], Callable],
    carry: Carry,
    layers: Tree,
    parts: Iterable[LayerRange],
    *,
    period: int,
) -> tuple[Carry, Tree]:
    """`jax.lax.scan` of step(policy)(carry, layers) over stacked layers, `period` of them a step.

    `parts` divide the layers. A step returns what it found per layer, with a leading axis for those
    of its period, and the scan all of them. Raises ValueError for parts that divide a period.
    """
    n_steps, found = jax.tree.leaves(layers)[0].shape[0], []
    for part in parts:
        check_whole_periods(part, period)
        chosen, run = layers, step(part.policy)
        if part.n_layers < n_steps * period:
            steps = slice(part.start // period, part.stop // period)
            chosen = jax.tree.map(lambda a, steps=steps: a[steps], layers)
        if part.group == 1:
            carry, ys = jax.lax.scan(run, carry, chosen)
        else:
            group = part.group // period
            chosen = jax.tree.map(lambda a, group=group: _in_groups(a, group), chosen)
            carry, ys = jax.lax.scan(_scan_group(step, part), carry, chosen)
            ys = jax.tree.map(_without_groups, ys)
        found.append(jax.tree.map(_without_groups, ys))
    return carry, found[0] if len(found) == 1 else jax.tree.map(_join, *found)


def check_whole_periods(part: LayerRange, period: int) -> None:
    """Raises ValueError if the part, or a group of it, ends within a period of layers."""
    if part.start % period or part.stop % period or (part.group > 1 and part.group % period):
        raise ValueError(
            f"learner.remat: layers {part.start} to {part.stop} in groups of {part.group} divide "
            f"the {period} layers that this model repeats; set first and group to multiples of "
            f"{period}, or model.layers='list'"
        )


def loop_remat(
    step: Callable[[str], Callable], carry: Carry, layers: Sequence[Tree], remat: Remat
) -> tuple[Carry, list[Tree]]:
    """The same as a loop over a list of layers, of step(policy)(carry, layer, index)."""
    found = []
    for part in remat.ranges(len(layers)):
        outer, inner = _group_policies(part)
        one = step(inner)
        for start in range(part.start, part.stop, part.group):
            run = functools.partial(_loop_group, one, outer, start)
            carry, ys = recompute(run, outer)(carry, layers[start : start + part.group])
            found += ys
    return carry, found


def _group_policies(part: LayerRange) -> tuple[str, str]:
    """(policy of a group of layers, of a layer in it): a group keeps its own input only."""
    if part.group == 1:
        return "none", part.policy
    return ("offload", "full") if part.policy == "offload" else ("full", part.policy)


def _scan_group(step: Callable[[str], Callable], part: LayerRange) -> Callable:
    outer, inner = _group_policies(part)

    def run(carry: Carry, layers: Tree) -> tuple[Carry, Tree]:
        x, state = carry
        return jax.lax.scan(step(inner), (layer_input(x, outer), state), layers)

    return recompute(run, outer)


def _loop_group(
    step: Callable, policy: str, start: int, carry: Carry, layers: Sequence[Tree]
) -> tuple[Carry, list[Tree]]:
    found, carry = [], (layer_input(carry[0], policy), carry[1])
    for i, layer in enumerate(layers, start):
        carry, y = step(carry, layer, i)
        found.append(y)
    return carry, found


def _in_groups(a: jax.Array, group: int) -> jax.Array:
    """[L, ...] -> [L / group, group, ...]"""
    spec = jax.P(None, *jax.typeof(a).sharding.spec)
    return jnp.reshape(a, (-1, group, *a.shape[1:]), out_sharding=spec)


def _without_groups(a: jax.Array) -> jax.Array:
    """The inverse of `_in_groups`."""
    return jnp.reshape(a, (-1, *a.shape[2:]), out_sharding=jax.P(*jax.typeof(a).sharding.spec[1:]))


def _join(*parts: jax.Array) -> jax.Array:
    return jnp.concatenate(parts)


@jax.custom_vjp
def finish_gradients(x: jax.Array, layer: Tree) -> tuple[jax.Array, Tree]:
    """Identity; in backward, the gradient of x waits for all gradients of the layer.

    XLA otherwise runs the backward passes of all layers first, and keeps what the gradients of
    their weights need.
    """
    return x, layer


finish_gradients.defvjp(
    lambda x, layer: ((x, layer), None), lambda _, grads: jax.lax.optimization_barrier(grads)
)
