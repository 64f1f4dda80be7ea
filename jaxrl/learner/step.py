"""Compiled programs of the learner: logprobs, values and updates."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct

import sharding
from jaxrl.config.keys import RunConfig
from jaxrl.data.packing import empty_teacher
from jaxrl.data.routing import to_array
from jaxrl.data.support import to_bits
from jaxrl.learner.host_gradients import add_gradients
from jaxrl.learner.image_patches import BatchImages
from jaxrl.learner.loss import (
    MicroBatchLoss,
    count_tokens,
    loss_gradients,
    policy_objective,
    score_and_record,
    score_collision,
    score_given_ids,
    score_tokens,
    score_top_k,
    score_values,
    value_objective,
)
from jaxrl.learner.optimizer import Optimizer, clip_factor
from jaxrl.learner.policy_objective import Coefs, LossSums, zero_sums
from jaxrl.learner.requirements import adapts_coefs, balances_experts, n_compared_ids
from jaxrl.learner.router import (
    Balance,
    correction_places,
    moved_corrections,
    no_load,
    router_metrics,
)
from jaxrl.learner.state import apply_gradients, trained_arrays, with_trained
from jaxrl.learner.xla import compiler_options
from jaxrl.learner.zero import Zero
from jaxrl.models.lora import split
from jaxrl.models.router_replay import routing_shape
from jaxrl.runtime.call_queue import MAX_IN_FLIGHT, CallQueue
from jaxrl.runtime.flat_program import FlatProgram, FlatTree, flatten, unflatten
from jaxrl.types import Array, Batch, TrainState, Tree
from sharding import (
    Rules,
    hosts,
    on_mesh,
    row_order,
    target_device_kind,
    target_platform,
    to_host,
)


@struct.dataclass
class GradSums:
    """float32 gradient of the summed loss, and the sums of losses and metrics."""

    grads: Tree  # FlatTree outside of the programs
    sums: LossSums
    squares: Array | None = None  # squared norm of grads in host memory; None on the device


def put_batch(
    batch: Batch,
    rules: Rules,
    n_vocab: int = 0,
    routing: tuple[int, int] | None = None,
    encoder: BatchImages | None = None,
    has_parts: bool = False,
    n_ids: int = 0,
) -> Batch:
    """Puts a host batch onto the mesh, rows sharded over the data-parallel axes.

    Tokens are in the order of the rules (zig-zag for ring attention). Every process passes the
    whole batch. The supports become bitsets of `n_vocab` ids, or are left out if it is 0; the
    experts become arrays of the shape `routing` per token, or are left out without one. The parts
    of the objective are left out without `has_parts`, the `n_ids` ids of a teacher if it is 0. With
    an `encoder` the batch has features or patches of images, all zero where it has none.
    """
    check_images(batch, encoder)
    if encoder is None:
        return sharding.put_batch(for_device(batch, n_vocab, routing, has_parts, n_ids), rules)
    batch = encoder.put(batch, rules)
    rest = dataclasses.replace(batch, images=None)
    rest = for_device(rest, n_vocab, routing, has_parts, n_ids)
    return dataclasses.replace(sharding.put_batch(rest, rules), images=batch.images)


def check_images(batch: Batch, encoder: BatchImages | None) -> None:
    """Raises ValueError for images without a tower that computes their features."""
    if batch.images is not None and encoder is None:
        raise ValueError(
            "the samples have images, and this model has no vision tower; use a model with one, "
            "or leave out the images of the dataset"
        )


def for_device(
    batch: Batch,
    n_vocab: int = 0,
    routing: tuple[int, int] | None = None,
    has_parts: bool = False,
    n_ids: int = 0,
) -> Batch:
    """A host batch whose optional fields are arrays or None, as in `put_batch`."""
    shape = batch.tokens.shape
    parts = np.zeros(shape, np.int32) if batch.parts is None else batch.parts
    return dataclasses.replace(
        batch,
        support=to_bits(batch.support, shape, n_vocab) if n_vocab else None,
        experts=to_array(batch.experts, shape, routing) if routing else None,
        parts=parts if has_parts else None,
        teacher=(batch.teacher or empty_teacher(shape, n_ids)) if n_ids else None,
    )


def take_tokens(per_token: jax.Array, rules: Rules) -> np.ndarray:
    """A device array [B, T] as a host array with tokens in sequence order."""
    return row_order(hosts.host_array(per_token), rules)


def make_score(cfg: RunConfig, rules: Rules, *, records: bool = False) -> FlatProgram:
    """Compiled score(params, batch) -> (logp, entropy) [B, T] of the targets.

    With `records`, also the experts [B, T, L, k]. `take_tokens` brings the results to the host.
    """
    return _score_program(score_and_record if records else score_tokens, cfg, rules)


def make_top_k(cfg: RunConfig, rules: Rules, *, given: bool = False) -> FlatProgram:
    """Compiled top_k(params, batch) -> (ids, logp) [B, T, k], of the batch's ids with `given`."""
    return _score_program(score_given_ids if given else score_top_k, cfg, rules)


def make_collision(cfg: RunConfig, rules: Rules) -> FlatProgram:
    """Compiled collision(params, batch) -> (logp, log Σ π²) [B, T] of the targets."""
    return _score_program(score_collision, cfg, rules)


def _score_program(score: Callable[..., Any], cfg: RunConfig, rules: Rules) -> FlatProgram:
    return FlatProgram(
        functools.partial(score, cfg=cfg, rules=rules), compiler_options=_options(cfg)
    )


def make_values(cfg: RunConfig, rules: Rules) -> FlatProgram:
    """Compiled values(params, batch) -> [B, T]: value of the state before each target."""
    return _score_program(score_values, cfg, rules)


def call_queue(n_vocab: int) -> CallQueue:
    """The calls of scoring or updates; one at a time if batches have bitsets of `n_vocab` ids.

    The bitsets of a second batch would need as much device memory again: V / 8 bytes per token.
    """
    return CallQueue(1 if n_vocab else MAX_IN_FLIGHT)


def _options(cfg: RunConfig) -> dict[str, Any] | None:
    return compiler_options(cfg.learner.xla, target_platform(), target_device_kind()) or None


class Update:
    """One optimizer step over any number of micro-batches.

    `accumulate` adds the gradient of a micro-batch to the running sums; `apply` divides once by the
    weight of all of them. So the step does not depend on packing or on the split into
    micro-batches. A step with a non-finite loss or gradient leaves the state unchanged and sets
    optim/nonfinite to 1.
    """

    def __init__(
        self,
        cfg: RunConfig,
        optimizer: Optimizer,
        rules: Rules,
        objective: MicroBatchLoss,
        encoder: BatchImages | None = None,
    ):
        self.encoder = encoder
        self._gradients = functools.partial(loss_gradients, objective, cfg=cfg, rules=rules)
        self._optimizer = optimizer
        self._balances = balances_experts(cfg)
        self._bias_rate = cfg.learner.router_bias_rate
        self._restricts = cfg.algorithm.keep_sampling_mask
        # A critic's loss has no further parts.
        self.has_parts = objective is policy_objective and bool(cfg.algorithm.parts)
        self.n_ids = n_compared_ids(cfg) if objective is policy_objective else 0
        self.put = functools.partial(
            put_batch,
            rules=rules,
            encoder=encoder,
            has_parts=self.has_parts,
            n_ids=self.n_ids,
        )
        # Changing coefficients are array arguments: as constants they would recompile every step.
        self._adapts = adapts_coefs(cfg)
        no_parts = (0.0,) * len(cfg.algorithm.parts)
        self._coefs = Coefs(cfg.algorithm.kl_coef, cfg.algorithm.entropy_coef, parts=no_parts)
        self._offload = "gradients" in cfg.learner.offload
        self._replays = cfg.learner.replays
        zeros = functools.partial(_zeros, cfg=cfg, zero=optimizer.zero, offload=self._offload)
        self.zeros = FlatProgram(zeros)
        self.zero_balance = FlatProgram(functools.partial(_zero_balance, replays=self._replays))
        program = functools.partial(FlatProgram, compiler_options=_options(cfg))
        count = functools.partial(count_tokens, cfg=cfg, rules=rules)
        self.count = program(count, donate_argnames="so_far")
        self._add = program(self._accumulate, donate_argnames="grads")
        self._step = program(self._apply, donate_argnames=("params", "opt_state", "step"))

    def update(
        self,
        state: TrainState,
        batches: Sequence[Batch],
        *,
        ref_params: Tree | None = None,
        extra_weight: int | float = 0.0,
        coefs: Coefs | None = None,
        on_micro_batch: Callable[[int], None] = lambda i: None,
    ) -> tuple[TrainState, dict[str, float]]:
        """(next state, metrics). `state` is donated: it must not be used afterwards.

        `extra_weight` counts rollouts without gradient that `batches` leaves out, in the unit of
        `algorithm.aggregation` (`policy_weight`). `coefs` are this update's coefficients of KL and
        entropy, if the config adapts them. `on_micro_batch(i)` is called when micro-batch i is
        known to be computed, while later ones are in flight. With a load-balancing loss a first
        pass over the micro-batches counts the tokens of each expert (learner/router.py).
        """
        params, ref_params = flatten(state.params), flatten(ref_params)
        total, n_vocab = self.zeros(params), self.n_vocab(state.params)
        put = functools.partial(self.put, n_vocab=n_vocab, routing=self.routing(state.params))
        balance, arrays = self.balance(params, batches, extra_weight), self._arrays(coefs)

        def read(i: int, weight: jax.Array) -> None:
            jax.block_until_ready(weight)
            on_micro_batch(i)

        with call_queue(n_vocab) as calls:
            for i, batch in enumerate(batches):
                calls.make_room()
                total = self.accumulate(
                    params,
                    ref_params,
                    total,
                    put(batch),  # no name: it would outlive its call
                    balance,
                    arrays,
                )
                calls.add(functools.partial(read, i, total.sums.weight))
            state, metrics = self.apply(state, total, np.float32(extra_weight))
        if self.encoder is not None:
            self.encoder.follow(state.params)
        return state, {name: float(value) for name, value in jax.device_get(metrics).items()}

    def accumulate(
        self,
        params: Tree,
        ref_params: Tree | None,
        total: GradSums,
        batch: Batch,
        balance: Balance | None = None,
        coefs: Coefs | None = None,
    ) -> GradSums:
        """`total` with those of a micro-batch added; its gradients are donated.

        The other sums are not, so that the host can wait for those of an earlier micro-batch.
        """
        return self._add(params, ref_params, *_without_grads(total), batch, balance, coefs)

    def apply(
        self, state: TrainState, total: GradSums, extra_weight: np.float32
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """(state after an optimizer step, metrics).

        `state` is donated except frozen parameters, which others may share.
        """
        whole = flatten(state.params)
        params, opt_state, step = trained_arrays(whole), state.opt_state, state.step
        places = self._moved_places(state.params)
        corrections = [whole.leaves[i] for i in places]
        stepped, metrics, moved = self._step(
            params, opt_state, step, total, extra_weight, corrections
        )
        params = with_trained(whole, stepped.params, dict(zip(places, moved, strict=True)))
        return dataclasses.replace(stepped, params=params), metrics

    def _moved_places(self, params: Tree) -> list[int]:
        """Places of the routers' corrections among the leaves of a model, if a step moves them."""
        return list(correction_places(params.cfg)) if self._bias_rate else []

    def n_vocab(self, params: Tree) -> int:
        """Ids in the bitsets of a batch; 0 if the loss does not restrict the policy to them."""
        restricts = self._restricts and "vocab" in params.cfg.heads
        return params.cfg.V if restricts else 0

    def routing(self, params: Tree) -> tuple[int, int] | None:
        """The shape of the experts of a token in a batch; None if the update replays none."""
        return routing_shape(params.cfg) if self._replays else None

    def lowerings(
        self, state: TrainState, batch: Batch, ref_params: Tree | None = None
    ) -> dict[str, Callable[[], jax.stages.Lowered]]:
        """The programs of `update`, to be lowered from (abstract) arguments."""
        total = self.abstract_zeros(state.params)
        balance, counting = None, {}
        if self._balances:
            zero_balance = jax.eval_shape(self.zero_balance, state.params, np.float32(0))
            balance = on_mesh(zero_balance, _mesh(state.params))
            counting = {"count": functools.partial(self.count.lower, state.params, balance, batch)}
        sums, coefs = _without_grads(total), self._arrays(None)
        accumulated = state.params, ref_params, *sums, batch, balance, coefs
        whole = flatten(state.params)
        corrections = [whole.leaves[i] for i in self._moved_places(state.params)]
        sizes = trained_arrays(whole), state.opt_state, state.step, total, np.float32(0)
        applied = *sizes, corrections
        return counting | {
            "accumulate": functools.partial(self._add.lower, *accumulated),
            "apply": functools.partial(self._step.lower, *applied),
            "zeros": functools.partial(self.zeros.lower, state.params),
        }

    def abstract_zeros(self, params: Tree) -> GradSums:
        """Shapes, dtypes, shardings and memory kinds of the sums of an update."""
        total = on_mesh(jax.eval_shape(self.zeros, params), _mesh(params))
        grads = to_host(total.grads) if self._offload else total.grads
        return dataclasses.replace(total, grads=grads)

    def balance(
        self, params: Tree, batches: Sequence[Batch], extra_weight: int | float = 0.0
    ) -> Balance | None:
        """Expert load of all micro-batches together; None without a load-balancing loss."""
        if not self._balances:
            return None
        balance = self.zero_balance(params, np.float32(extra_weight))
        routing = self.routing(unflatten(params))
        for batch in batches:
            balance = self.count(params, balance, self.put(batch, routing=routing))
        return balance

    @property
    def n_compiled(self) -> int:
        """Number of programs compiled so far; constant after warm-up."""
        programs = self.zeros, self.zero_balance, self.count, self._add, self._step
        return sum(program.n_compiled for program in programs)

    def _arrays(self, coefs: Coefs | None) -> Coefs | None:
        """None if the config fixes the coefficients: then they are constants of the program."""
        return jax.tree.map(np.float32, coefs or self._coefs) if self._adapts else None

    @jax.named_scope("update")
    def _accumulate(
        self,
        params,
        ref_params,
        grads: Tree,
        so_far: GradSums,
        batch: Batch,
        balance: Balance | None,
        coefs: Coefs | None,
    ) -> GradSums:
        """The sums `so_far`, with gradients `grads`, and those of a micro-batch."""
        new, sums = self._gradients(params, ref_params, batch, balance, coefs)
        new = self._optimizer.zero.shard_gradients(new)
        sums = so_far.sums + sums
        if self._offload:
            added, squares = add_gradients(grads, new)
            return GradSums(flatten(added), sums, squares)
        added = jax.tree.map(lambda total, g: total + g.astype(total.dtype), grads, new)
        return GradSums(flatten(added), sums)

    @jax.named_scope("optimizer")
    def _apply(
        self, params, opt_state, step, total: GradSums, extra_weight, corrections: list[jax.Array]
    ):
        state, sums = TrainState(params, opt_state, step), total.sums
        weight = sums.weight + extra_weight
        empty = weight <= 0  # padding, or every token is rejected
        weight = jnp.where(empty, 1.0, weight)
        squares = total.squares
        norm = optax.tree.norm(total.grads) if squares is None else jnp.sqrt(squares)
        norm = norm / weight
        factor = clip_factor(norm, self._optimizer.clip_norm) / weight
        losses = {name: value / weight for name, value in sums.losses.items()}
        nonfinite = ~(jnp.isfinite(losses["loss/total"]) & jnp.isfinite(norm))
        metrics = {
            **losses,
            **{name: mean / jnp.maximum(n, 1e-9) for name, (mean, n) in sums.means.items()},
            **{name: jnp.where(x == -jnp.inf, 0.0, x) for name, x in sums.maxima.items()},
            **router_metrics(sums.router),
            "optim/grad_norm": norm,
            "optim/lr": self._optimizer.lr(state.step),
            "optim/nonfinite": nonfinite.astype(jnp.float32),
        }
        if params.cfg.tower is not None and squares is None:
            vision = optax.tree.norm(total.grads.tower)
            metrics["optim/vision_grad_norm"] = vision / weight
        # The barrier keeps XLA from computing both again in the loop of every array.
        keep, factor = jax.lax.optimization_barrier((nonfinite | empty, factor))
        state = apply_gradients(state, total.grads, self._optimizer, keep=keep, factor=factor)
        if corrections and sums.router is not None:
            rows = list(correction_places(params.cfg).values())
            moved = moved_corrections(corrections, sums.router, rows, rate=self._bias_rate)
            corrections = jax.tree.map(functools.partial(jnp.where, keep), corrections, moved)
        flat = TrainState(flatten(state.params), flatten(state.opt_state), state.step)
        return flat, metrics, corrections


def _mesh(params: Tree) -> jax.sharding.Mesh:
    return jax.tree.leaves(params)[0].sharding.mesh


def _zeros(params: Tree, *, cfg: RunConfig, zero: Zero, offload: bool) -> GradSums:
    grads = jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), split(params)[0])
    sums = zero_sums(cfg.algorithm, params.cfg, replays=cfg.learner.replays)
    grads = flatten(zero.shard_gradients(grads))
    return GradSums(to_host(grads), sums, jnp.zeros(())) if offload else GradSums(grads, sums)


def _without_grads(total: GradSums) -> tuple[FlatTree, GradSums]:
    """(the gradients, the other sums)."""
    return total.grads, dataclasses.replace(total, grads=None)


def _zero_balance(params: Tree, extra_weight: jax.Array, *, replays: bool) -> Balance:
    return Balance(no_load(params.cfg, replays=replays), extra_weight)


def make_update(
    cfg: RunConfig, optimizer: Optimizer, rules: Rules, encoder: BatchImages | None = None
) -> Update:
    """Update of the policy; `optimizer` must be the one that made the train state."""
    return Update(cfg, optimizer, rules, policy_objective, encoder)


def make_value_update(
    cfg: RunConfig, optimizer: Optimizer, rules: Rules, encoder: BatchImages | None = None
) -> Update:
    """Update of a separate critic; `cfg` is `RunConfig.critic_run`."""
    return Update(cfg, optimizer, rules, value_objective, encoder)
