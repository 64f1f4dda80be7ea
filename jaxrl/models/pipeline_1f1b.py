"""Gradient of a loss under a pipeline with the schedule 1F1B (one forward, one backward).

PipeDream-Flush, https://arxiv.org/abs/2006.09503, as in Megatron-LM
(https://arxiv.org/abs/2104.04473, section 2.2). With S stages and M micro-batches, stage s runs
micro-batch m forward at tick m + s and backward at tick m + 2 (S - 1) - s; the last stage does both
at one tick, with the loss between them. So a stage keeps the activations of at most 2 S - 1
micro-batches, where GPipe (pipeline.py) keeps those of all. All stages of a mesh run one program,
so a tick is one forward and one backward pass of every stage, except that the first S - 1 ticks run
only forward and the last S - 1 only backward:

    tick        0    1    2    3    4    5    S = 2, M = 4
    stage 0    F0   F1   F2   F3    .    .    forward of micro-batch 0, 1, ...
                .    .   B0   B1   B2   B3    backward
    stage 1     .   F0   F1   F2   F3    .
                .   B0   B1   B2   B3    .

The backward pass is part of the loop and not derived from it, so the loss is a function of the
hidden states of one micro-batch, whose sums are added.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Float

from jaxrl.models.pipeline import from_stages, shard_over_stages, to_micro_batches, to_stages
from jaxrl.types import Tree
from sharding import Rules


@struct.dataclass
class Gradients:
    """Result of `gradients_1f1b`. Gradients of parameters are float32."""

    layers: Tree
    top: Tree
    x: Tree  # [B, T, D] as [M, ranks, T, D], the gradient of the input of the first layer
    sums: Tree  # of the objective
    load: Tree  # sums per layer, that the stages return


@struct.dataclass
class _Carry:
    """State between ticks. What stages own has a leading stage axis S."""

    sent: Tree  # [S, ranks, T, D], inputs of the stages
    returned: Tree  # [S, ranks, T, D], gradients of the outputs of the stages
    saved: Tree  # list of [S, 2S - 1, ...], what backward needs of the last micro-batches
    x: Tree  # [M, ranks, T, D], inputs of the first layer; after backward, their gradients
    layers: Tree
    top: Tree
    sums: Tree


def gradients_1f1b(
    stage: Callable[..., tuple[jax.Array, Tree]],
    objective: Callable[..., tuple[jax.Array, Tree]],
    layers: Tree,
    frozen: Tree,
    top: Tree,
    x: Float[Array, "M R T D"],
    stage_rows: Tree,
    rows: Tree,
    *,
    zero_sums: Tree,
    load_gradient: Tree,
    rules: Rules,
) -> Gradients:
    """Gradients of the sum of the objective over micro-batches, each a row of every rank.

    `stage(layers, frozen, x, *rows)` runs the layers of a stage and returns their output and sums
    over tokens, [layers, ...]; `layers` and `frozen` are sharded over the stages, and only `layers`
    has a gradient. `objective(top, hidden, rows)` is (loss, sums) of one micro-batch from the
    output of the last layer. `stage_rows` and `rows` are the further inputs of both, [B, T, ...].
    `load_gradient` is the gradient of the loss with respect to the sums of `stage`. `zero_sums` are
    the sums of no micro-batch.
    """
    layers, frozen, load_gradient = jax.tree.map(
        lambda a: shard_over_stages(a, rules.mesh_axes("layers")[0]),
        (layers, frozen, load_gradient),
    )
    stage_rows = jax.tree.map(lambda a: to_stages(to_micro_batches(a, rules), rules), stage_rows)
    rows = jax.tree.map(lambda a: to_micro_batches(a, rules), rows)
    loop = _Loop(stage, objective, (layers, frozen, stage_rows), top, rows, load_gradient, rules)
    n_micro, n_stages = x.shape[0], rules.n_shards("layers")

    def warm_up(carry: _Carry, tick):
        carry, _, load = loop.forward(carry, tick)
        return carry, load

    def both(carry: _Carry, tick):
        carry, done, load = loop.forward(carry, tick)
        carry, gradient = loop.loss(carry, done, tick - (n_stages - 1))
        return loop.backward(carry, gradient, tick), load

    def drain(carry: _Carry, tick):
        return loop.backward(carry, jnp.zeros_like(carry.sent), tick), None

    carry = loop.start(x, zero_sums)
    first, last = n_stages - 1, n_stages - 1 + n_micro
    carry, early = lax.scan(warm_up, carry, jnp.arange(first))
    carry, late = lax.scan(both, carry, jnp.arange(first, last))
    carry, _ = lax.scan(drain, carry, jnp.arange(last, last + first))
    load = jax.tree.map(lambda a, b: jnp.sum(a, axis=0) + jnp.sum(b, axis=0), early, late)
    return Gradients(carry.layers, carry.top, carry.x, carry.sums, load)


@dataclasses.dataclass(frozen=True)
class _Loop:
    """The parts of a tick, with the arrays that all ticks read."""

    stage: Callable
    objective: Callable
    owned: tuple[Tree, Tree, Tree]  # layers, frozen [L, ...] and rows [S, M, ranks, T] of stages
    top: Tree
    rows: Tree  # [M, ranks, T, ...]
    load_gradient: Tree
    rules: Rules

    @property
    def axis(self) -> str:
        return self.rules.mesh_axes("layers")[0]

    def start(self, x: jax.Array, zero_sums: Tree) -> _Carry:
        sent = jnp.zeros_like(self._enter(x[:1]))
        n_saved = 2 * self.rules.n_shards("layers") - 1

        def saved(_, owned, sent):
            kept = self._differentiate(owned, sent[0], 0)[2]
            return [_zeros((1, n_saved), a) for a in kept]

        def zeros(tree: Tree) -> Tree:
            return jax.tree.map(lambda a: jnp.zeros_like(a, jnp.float32), tree)

        kept = self._on_stages(saved, 0, self.owned, sent)
        return _Carry(sent, sent, kept, x, zeros(self.owned[0]), zeros(self.top), zero_sums)

    def forward(self, carry: _Carry, tick: jax.Array) -> tuple[_Carry, jax.Array, Tree]:
        """(carry, outputs of the stages, loads)."""
        n_micro = carry.x.shape[0]
        first = jnp.minimum(tick, n_micro - 1)
        entering = self._enter(lax.dynamic_slice_in_dim(carry.x, first, 1))

        def body(tick, owned, entering, sent, saved):
            index = tick - lax.axis_index(self.axis)
            inputs = jnp.where(lax.axis_index(self.axis) == 0, entering[0], sent[0])
            (done, load), _, kept = self._differentiate(
                owned, inputs, jnp.clip(index, 0, n_micro - 1)
            )
            slot = index % saved[0].shape[1]
            saved = [
                lax.dynamic_update_slice_in_dim(a, new[None, None], slot, 1)
                for a, new in zip(saved, kept, strict=True)
            ]
            busy = (index >= 0) & (index < n_micro)
            load = jax.tree.map(lambda a: jnp.where(busy, a, 0), load)
            return self._pass(done, 1)[None], done[None], saved, load

        sent, done, saved, load = self._on_stages(
            body, tick, self.owned, entering, carry.sent, carry.saved
        )
        return dataclasses.replace(carry, sent=sent, saved=saved), done, load

    def loss(self, carry: _Carry, done: jax.Array, index: jax.Array) -> tuple[_Carry, jax.Array]:
        """(carry, gradients of the outputs of the stages, of which the last stage uses its own)."""
        hidden = self._leave(done, -1)[0]
        rows = jax.tree.map(lambda a: a[index], self.rows)
        _, pull_back, sums = jax.vjp(
            lambda top, hidden: self.objective(top, hidden, rows), self.top, hidden, has_aux=True
        )
        top, gradient = pull_back(jnp.ones((), jnp.float32))
        top = jax.tree.map(lambda total, g: total + g.astype(total.dtype), carry.top, top)
        carry = dataclasses.replace(carry, top=top, sums=carry.sums + sums)
        return carry, self._enter(gradient[None])

    def backward(self, carry: _Carry, gradient: jax.Array, tick: jax.Array) -> _Carry:
        n_micro, n_stages = carry.x.shape[0], self.rules.n_shards("layers")

        def body(tick, owned, gradient, returned, saved, load, total):
            place = lax.axis_index(self.axis)
            index = tick - 2 * (n_stages - 1) + place
            busy = (index >= 0) & (index < n_micro)
            out = jnp.where(place == n_stages - 1, gradient[0], returned[0])
            out = jax.tree.map(lambda a: jnp.where(busy, a, 0), (out, load))
            kept = [a[0, index % a.shape[1]] for a in saved]
            # Only the function of `kept` is used: XLA removes this forward pass.
            _, restore, _ = self._differentiate(
                owned, jnp.zeros_like(returned[0]), jnp.clip(index, 0, n_micro - 1)
            )
            layers, x = restore(kept)(out)
            total = jax.tree.map(
                lambda a, g: jnp.where(busy, a + g.astype(a.dtype), a), total, layers
            )
            return self._pass(x, -1)[None], x[None], total

        own = carry.returned, carry.saved, self.load_gradient, carry.layers
        returned, x, layers = self._on_stages(body, tick, self.owned, gradient, *own)
        # The input of micro-batch 0 was read at tick 0, and is overwritten from tick 1 on.
        index = jnp.maximum(tick - 2 * (n_stages - 1), 0)
        x = lax.dynamic_update_slice_in_dim(carry.x, self._leave(x, 0), index, 0)
        return dataclasses.replace(carry, returned=returned, x=x, layers=layers)

    def _differentiate(self, owned, x: jax.Array, index) -> tuple[Any, Callable, list[jax.Array]]:
        """(outputs of the stage, kept -> VJP, kept): kept are the residuals of this micro-batch.

        Weights, rows and constants, which the backward pass has, are not among them.
        """
        layers, frozen, rows = owned
        rows = jax.tree.map(lambda a: a[0, index], rows)
        out, pull_back = jax.vjp(lambda layers, x: self.stage(layers, frozen, x, *rows), layers, x)
        leaves, structure = jax.tree.flatten(pull_back)
        known = {id(a) for a in jax.tree.leaves((layers, frozen, rows))}
        is_kept = [isinstance(a, Tracer) and id(a) not in known for a in leaves]

        def restore(kept: list[jax.Array]) -> Callable:
            saved = iter(kept)
            pairs = zip(leaves, is_kept, strict=True)
            return jax.tree.unflatten(structure, [next(saved) if k else a for a, k in pairs])

        return out, restore, [a for a, k in zip(leaves, is_kept, strict=True) if k]

    def _enter(self, x: jax.Array) -> jax.Array:
        """[1, ranks, T, D] outside the stages -> [S, ranks, T, D]."""
        x = to_stages(x, self.rules)[:, 0]
        spec = self.rules.in_stage().residual_spec(x.shape[1:])
        return jax.reshard(x, jax.P(self.axis, *spec))

    def _leave(self, x: jax.Array, place: int) -> jax.Array:
        """The inverse of `_enter` for the array of one stage."""
        whole = self.rules.in_stage().spec("batch", "time", "embed")
        x = jax.reshard(x, jax.P(self.axis, *whole))

        def only(_, x):
            chosen = place % lax.axis_size(self.axis)
            here = lax.axis_index(self.axis) == chosen
            return jnp.where(here, x, jnp.zeros_like(x))

        return from_stages(self._on_stages(only, 0, x)[:, None], self.rules)

    def _pass(self, x: jax.Array, step: int) -> jax.Array:
        n = lax.axis_size(self.axis)
        return lax.ppermute(x, self.axis, [(i, (i + step) % n) for i in range(n)])

    def _on_stages(self, body: Callable, tick: jax.Array | int, *args: Tree) -> Any:
        """body(tick, *args) on every stage, with its parts of the arguments and of the results."""
        mapped = jax.shard_map(
            body,
            in_specs=(jax.P(), *(jax.P(self.axis) for _ in args)),
            out_specs=jax.P(self.axis),
            axis_names={self.axis},
            check_vma=False,
        )
        return mapped(jnp.asarray(tick), *args)


def _zeros(leading: tuple[int, ...], like: jax.Array) -> jax.Array:
    spec = jax.P(*(None for _ in leading), *jax.typeof(like).sharding.spec)
    return jnp.zeros((*leading, *like.shape), like.dtype, out_sharding=spec)
