"""Gradient of a loss under a pipeline with the schedule 1F1B (one forward, one backward).

PipeDream-Flush, https://arxiv.org/abs/2006.09503, as in Megatron-LM
(https://arxiv.org/abs/2104.04473, section 2.2): with S stages, stage s runs micro-batch m forward
at tick m + s and backward at tick m + 2 (S - 1) - s; the last stage does both at one tick, with the
loss between them. So a stage keeps the activations of at most 2 S - 1 micro-batches, where GPipe
(pipeline.py) keeps those of all. All stages of a mesh run one program, so a tick is one forward and
one backward pass of every stage, except that the first S - 1 ticks run only forward and the last
S - 1 only backward:

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
from typing import Any, NamedTuple

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
    added: Tree  # [M, ranks, T, ...], the gradient of further inputs
    sums: Tree  # of the objective
    load: Tree  # sums per layer, that the stages return


@struct.dataclass
class _Carry:
    """State between ticks. Arrays that stages own are sharded over them by the leading axis."""

    sent: Tree  # [S, ranks, T, D], inputs of the stages
    returned: Tree  # [S, ranks, T, D], gradients of the outputs of the stages
    saved: Tree  # list of [S, slots, ...], what backward needs of micro-batches
    x: Tree  # [M, ranks, T, D], inputs of the first layer; after backward, their gradients
    added: Tree  # [S, M, ranks, T, ...], gradients of further inputs by each stage
    layers: Tree
    load: Tree
    top: Tree
    sums: Tree


class Pass(NamedTuple):
    """One micro-batch in one stage; an idle stage has the first or the last micro-batch."""

    micro_batch: jax.Array
    slot: jax.Array  # where the stage saves what backward needs of it
    busy: jax.Array  # False: the stage is idle


def gradients_1f1b(
    stage: Callable[..., tuple[jax.Array, Tree]],
    objective: Callable[..., tuple[jax.Array, Tree]],
    layers: Tree,
    frozen: Tree,
    top: Tree,
    x: Float[Array, "M R T D"],
    added: Tree,
    stage_rows: Tree,
    rows: Tree,
    *,
    zero_sums: Tree,
    load_gradient: Tree,
    rules: Rules,
) -> Gradients:
    """Gradients of the sum of the objective over micro-batches, each a row of every rank.

    `stage(layers, frozen, x, added, *rows)` runs the layers of a stage and returns their output and
    sums over tokens, [layers, ...]; `layers` and `frozen` are sharded over the stages, and only
    `layers` has a gradient. `objective(top, hidden, rows)` is (loss, sums) of one micro-batch from
    the output of the last layer. `stage_rows` and `rows` are the further inputs of both,
    [B, T, ...]; `added`, [M, ranks, T, ...], are those of all stages that have a gradient. If the
    caller does not use it, as with a frozen vision tower, `jax.jit` removes it from the loops.
    `load_gradient` is the gradient of the loss with respect to the sums of `stage`. `zero_sums` are
    the sums of no micro-batch.
    """
    (axis,) = rules.mesh_axes("layers")
    layers, frozen, load_gradient = jax.tree.map(
        lambda a: shard_over_stages(a, axis), (layers, frozen, load_gradient)
    )
    stage_rows = jax.tree.map(lambda a: to_stages(to_micro_batches(a, rules), rules), stage_rows)
    rows = jax.tree.map(lambda a: to_micro_batches(a, rules), rows)
    added = jax.tree.map(lambda a: to_stages(a, rules), added)
    owned = layers, frozen, (added, *stage_rows)
    loop = _Loop(stage, objective, owned, top, rows, load_gradient, rules, n_micro=x.shape[0])
    carry = _run(loop, loop.start(x, zero_sums))
    added = jax.tree.map(lambda a: from_stages(a, rules), carry.added)
    return Gradients(carry.layers, carry.top, carry.x, added, carry.sums, carry.load)


def _run(loop: "_Loop", carry: _Carry) -> _Carry:
    """All ticks. In those with a loss a micro-batch completes its forward pass.

    There a new one enters stage 0 (for the next tick), and one leaves it, as a gradient.
    """
    lead = loop.n_stages - 1
    n_ticks = loop.n_micro + lead  # from the first to the last forward pass

    def warm_up(carry: _Carry, tick):
        carry, _ = loop.forward(carry, tick)
        return loop.enter(carry, tick + 1), None

    def with_loss(carry: _Carry, tick):
        carry, done = loop.forward(carry, tick)
        carry = loop.loss(loop.leave(carry, tick), done, tick)
        return loop.enter(loop.backward(carry, tick), tick + 1), None

    def drain(carry: _Carry, tick):
        return loop.backward(loop.leave(carry, tick), tick), None

    carry, _ = lax.scan(warm_up, loop.enter(carry, 0), jnp.arange(lead))
    carry, _ = lax.scan(with_loss, carry, jnp.arange(lead, n_ticks))
    carry, _ = lax.scan(drain, carry, jnp.arange(n_ticks, n_ticks + lead))
    return loop.leave(carry, n_ticks + lead)


@dataclasses.dataclass(frozen=True)
class _Loop:
    """The parts of a tick, with the arrays that all ticks read."""

    stage: Callable
    objective: Callable
    owned: tuple[Tree, Tree, Tree]  # layers, frozen [L, ...] and rows [S, M, ranks, T] of stages,
    # of which the first have a gradient
    top: Tree
    rows: Tree  # [M, ranks, T, ...]
    load_gradient: Tree  # [L, ...]
    rules: Rules
    n_micro: int  # M

    @property
    def axis(self) -> str:
        return self.rules.mesh_axes("layers")[0]

    @property
    def n_stages(self) -> int:
        return self.rules.n_shards("layers")

    @property
    def n_saved(self) -> int:
        """Micro-batches of the first stage between their forward and backward pass, at most."""
        return 2 * self.n_stages - 1

    def forward_pass(self, stage: jax.Array | int, tick: jax.Array | int) -> Pass:
        return self._pass(tick - stage, jnp.asarray(tick % self.n_saved))

    def backward_pass(self, stage: jax.Array | int, tick: jax.Array | int) -> Pass:
        index = tick - (2 * self.n_stages - 2 - stage)
        return self._pass(index, (index + stage) % self.n_saved)

    def _pass(self, index, slot) -> Pass:
        busy = (index >= 0) & (index < self.n_micro)
        return Pass(jnp.clip(index, 0, self.n_micro - 1), slot, busy)

    def start(self, x: jax.Array, zero_sums: Tree) -> _Carry:
        sent = jnp.zeros_like(self._to_stages(x[:1]))

        def saved(tick, owned, sent):
            now = self.forward_pass(lax.axis_index(self.axis), tick)
            kept = self._differentiate(owned, sent[0], now)[2]
            return [_zeros((1, self.n_saved), a) for a in kept]

        def zeros(tree: Tree) -> Tree:
            return jax.tree.map(lambda a: jnp.zeros_like(a, jnp.float32), tree)

        kept = self._on_stages(saved, 0, self.owned, sent)
        layers, load, top = zeros((self.owned[0], self.load_gradient, self.top))
        added = jax.tree.map(jnp.zeros_like, self.owned[2][0])
        return _Carry(sent, sent, kept, x, added, layers, load, top, zero_sums)

    def enter(self, carry: _Carry, tick: jax.Array | int) -> _Carry:
        """Before this tick: the input of stage 0."""
        x = lax.dynamic_slice_in_dim(carry.x, self.forward_pass(0, tick).micro_batch, 1)
        return dataclasses.replace(carry, sent=self._replace(carry.sent, x, 0))

    def forward(self, carry: _Carry, tick: jax.Array) -> tuple[_Carry, jax.Array]:
        """(carry, outputs of the stages)."""

        def body(tick, owned, sent, saved, total):
            now = self.forward_pass(lax.axis_index(self.axis), tick)
            (done, load), _, kept = self._differentiate(owned, sent[0], now)
            saved = [
                lax.dynamic_update_slice_in_dim(a, new[None, None], now.slot, 1)
                for a, new in zip(saved, kept, strict=True)
            ]
            return self._shift(done, 1)[None], done[None], saved, _add(total, load, now.busy)

        sent, done, saved, load = self._on_stages(
            body, tick, self.owned, carry.sent, carry.saved, carry.load
        )
        return dataclasses.replace(carry, sent=sent, saved=saved, load=load), done

    def loss(self, carry: _Carry, done: jax.Array, tick: jax.Array) -> _Carry:
        """The loss of the last stage's output, whose gradient the stage gets."""
        last = self.n_stages - 1
        hidden = self._from_stage(done, last)[0]
        index = self.forward_pass(last, tick).micro_batch
        rows = jax.tree.map(lambda a: a[index], self.rows)
        _, pull_back, sums = jax.vjp(
            lambda top, hidden: self.objective(top, hidden, rows), self.top, hidden, has_aux=True
        )
        top, gradient = pull_back(jnp.ones((), jnp.float32))
        top = jax.tree.map(lambda total, g: total + g.astype(total.dtype), carry.top, top)
        returned = self._replace(carry.returned, gradient[None], last)
        return dataclasses.replace(carry, returned=returned, top=top, sums=carry.sums + sums)

    def backward(self, carry: _Carry, tick: jax.Array) -> _Carry:
        def body(tick, owned, returned, saved, load, total, added):
            now = self.backward_pass(lax.axis_index(self.axis), tick)
            out = jax.tree.map(lambda a: jnp.where(now.busy, a, 0), (returned[0], load))
            kept = [a[0, now.slot] for a in saved]
            # Only the function of `kept` is used: XLA removes this forward pass.
            _, restore, _ = self._differentiate(owned, jnp.zeros_like(returned[0]), now)
            layers, x, more = restore(kept)(out)
            # An idle stage adds zeros: its `out` is zero.
            added = jax.tree.map(lambda a, b: a.at[0, now.micro_batch].add(b), added, more)
            return self._shift(x, -1)[None], _add(total, layers, now.busy), added

        own = carry.returned, carry.saved, self.load_gradient, carry.layers, carry.added
        returned, layers, added = self._on_stages(body, tick, self.owned, *own)
        return dataclasses.replace(carry, returned=returned, layers=layers, added=added)

    def leave(self, carry: _Carry, tick: jax.Array | int) -> _Carry:
        """Before this tick: stores the gradient of the first layer's input, from the tick before.

        Stage 0 has passed it to the last stage. In earlier ticks, what the last stage has is
        written to the place of the first gradient, whose input has been read.
        """
        x = self._from_stage(carry.returned, self.n_stages - 1)
        index = self.backward_pass(0, tick - 1).micro_batch
        return dataclasses.replace(carry, x=lax.dynamic_update_slice_in_dim(carry.x, x, index, 0))

    def _differentiate(self, owned, x: jax.Array, now: Pass) -> tuple[Any, Callable, list]:
        """(outputs of the stage, kept -> VJP, kept): kept are the residuals of this pass.

        Weights, rows and constants, which the backward pass has, are not among them.
        """
        layers, frozen, rows = owned
        added, *rows = jax.tree.map(lambda a: a[0, now.micro_batch], rows)

        def run(layers: Tree, x: jax.Array, added: Tree) -> tuple[jax.Array, Tree]:
            return self.stage(layers, frozen, x, added, *rows)

        out, pull_back = jax.vjp(run, layers, x, added)
        leaves, structure = jax.tree.flatten(pull_back)
        known = {id(a) for a in jax.tree.leaves((layers, frozen, added, rows))}
        is_kept = [isinstance(a, Tracer) and id(a) not in known for a in leaves]

        def restore(kept: list[jax.Array]) -> Callable:
            saved = iter(kept)
            pairs = zip(leaves, is_kept, strict=True)
            return jax.tree.unflatten(structure, [next(saved) if k else a for a, k in pairs])

        return out, restore, [a for a, k in zip(leaves, is_kept, strict=True) if k]

    def _to_stages(self, x: jax.Array) -> jax.Array:
        """[1, ranks, T, D] outside the stages -> [S, ranks, T, D], the same on every stage."""
        x = to_stages(x, self.rules)[:, 0]
        spec = self.rules.in_stage().residual_spec(x.shape[1:])
        return jax.reshard(x, jax.P(self.axis, *spec))

    def _from_stage(self, x: jax.Array, stage: int) -> jax.Array:
        """[S, ranks, T, D] -> [1, ranks, T, D] outside the stages, the array of one stage."""
        whole = self.rules.in_stage().spec("batch", "time", "embed")
        x = jax.reshard(x, jax.P(self.axis, *whole))

        def only(_, x):
            here = lax.axis_index(self.axis) == stage
            return jnp.where(here, x, jnp.zeros_like(x))

        return from_stages(self._on_stages(only, 0, x)[:, None], self.rules)

    def _replace(self, arrays: jax.Array, x: jax.Array, stage: int) -> jax.Array:
        """`arrays` [S, ranks, T, D] with x [1, ranks, T, D] as that of one stage."""

        def choose(_, arrays, x):
            return jnp.where(lax.axis_index(self.axis) == stage, x, arrays)

        return self._on_stages(choose, 0, arrays, self._to_stages(x))

    def _shift(self, x: jax.Array, step: int) -> jax.Array:
        n = lax.axis_size(self.axis)
        return lax.ppermute(x, self.axis, [(i, (i + step) % n) for i in range(n)])

    def _on_stages(self, body: Callable, argument: jax.Array | int, *args: Tree) -> Any:
        """body(argument, *args) on every stage, with its parts of `args` and of the results."""
        mapped = jax.shard_map(
            body,
            in_specs=(jax.P(), *(jax.P(self.axis) for _ in args)),
            out_specs=jax.P(self.axis),
            axis_names={self.axis},
            check_vma=False,
        )
        return mapped(jnp.asarray(argument), *args)


def _zeros(leading: tuple[int, ...], like: jax.Array) -> jax.Array:
    spec = jax.P(*(None for _ in leading), *jax.typeof(like).sharding.spec)
    return jnp.zeros((*leading, *like.shape), like.dtype, out_sharding=spec)


def _add(total: Tree, more: Tree, busy: jax.Array) -> Tree:
    """Sums of a stage with those of a pass added, if the stage is busy."""
    return jax.tree.map(lambda a, b: a + jnp.where(busy, b.astype(a.dtype), 0), total, more)
