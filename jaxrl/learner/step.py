"""Compiled scoring and updates of the learner."""

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct

import sharding
from jaxrl.config.keys import AlgorithmConfig, RunConfig, ScoringConfig
from jaxrl.data.packing import empty_batch
from jaxrl.data.support import join_packed, to_bits
from jaxrl.layout import Layout, training_rules
from jaxrl.learner.host_gradients import add_gradients
from jaxrl.learner.loss import (
    MicroBatchLoss,
    count_tokens,
    loss_gradients,
    policy_objective,
    score_tokens,
    score_values,
    value_objective,
)
from jaxrl.learner.optimizer import Optimizer, clip_factor
from jaxrl.learner.policy_objective import Coefs, LossSums, zero_sums
from jaxrl.learner.requirements import adapts_coefs
from jaxrl.learner.router import Balance, no_load, router_metrics
from jaxrl.learner.state import apply_gradients, trained_state
from jaxrl.learner.xla import compiler_options
from jaxrl.learner.zero import Zero
from jaxrl.models.lora import combine, split
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

    grads: Tree
    sums: LossSums
    squares: Array | None = None  # squared norm of grads in host memory; None on the device


def put_batch(batch: Batch, rules: Rules, n_vocab: int = 0) -> Batch:
    """Puts a host batch onto the mesh, rows sharded over the data-parallel axes.

    Tokens are in the order of the rules (zig-zag for ring attention). Every process passes the
    whole batch. The supports become bitsets of `n_vocab` ids, or are left out if it is 0.
    """
    support = to_bits(batch.support, batch.tokens.shape, n_vocab) if n_vocab else None
    return sharding.put_batch(dataclasses.replace(batch, support=support), rules)


def take_tokens(per_token: jax.Array, rules: Rules) -> np.ndarray:
    """A device array [B, T] as a host array with tokens in sequence order."""
    return row_order(hosts.host_array(per_token), rules)


def make_score(cfg: RunConfig, rules: Rules) -> Callable:
    """Jitted score(params, batch) -> (logp, entropy) [B, T] of the targets.

    `take_tokens` brings the results to the host.
    """
    return jax.jit(
        functools.partial(score_tokens, cfg=cfg, rules=rules), compiler_options=_options(cfg)
    )


def make_values(cfg: RunConfig, rules: Rules) -> Callable:
    """Jitted values(params, batch) -> [B, T]: value of the state before each target."""
    return jax.jit(
        functools.partial(score_values, cfg=cfg, rules=rules), compiler_options=_options(cfg)
    )


class Scorer:
    """Computes logprobs in the layout of a role (score or ref)."""

    def __init__(
        self,
        cfg: RunConfig,
        layout: Layout,
        role: ScoringConfig,
        *,
        restricted: bool = False,
        of_training: bool = False,
    ):
        """`restricted`: under the supports of the batches.

        `of_training`: all parameters are given in training's layout; calls reshard them.
        """
        self.layout, self.restricted, self.of_training = layout, restricted, of_training
        self.score = make_score(cfg, layout.rules)
        self.n_joined = micro_batches_per_call(cfg, layout, role.token_budget)
        self.n_least = micro_batches_per_call(cfg, layout)

    def logps(
        self,
        params: Tree,
        batches: Sequence[Batch],
        on_batch: Callable[[], None] = lambda: None,
    ) -> list[np.ndarray]:
        """Logprobs [B, T] of each micro-batch of training.

        `params` are sharded by the layout, whose mesh is the current one, except `of_training`.
        Micro-batches of one shape are joined: as many as the role's token budget has room for, and
        the remaining ones so that a rank has the same number of rows as in training. `on_batch` is
        called before each device call.
        """
        if not self.of_training:
            return self._logps(params, batches, on_batch)
        with self.layout.weights(params) as resharded:
            return self._logps(resharded, batches, on_batch)

    def _logps(
        self, params: Tree, batches: Sequence[Batch], on_batch: Callable[[], None]
    ) -> list[np.ndarray]:
        by_shape = collections.defaultdict(list)
        for i, batch in enumerate(batches):
            by_shape[batch.tokens.shape].append(i)
        found: dict[int, np.ndarray] = {}
        n_vocab = params.cfg.V if self.restricted else 0
        for shape, indices in by_shape.items():
            for group, n_joined in self._groups(indices):
                padding = [empty_batch(*shape)] * (n_joined - len(group))
                parts = [*(batches[i] for i in group), *padding]
                joined = join_batches(parts)
                on_batch()
                logp = self.score(params, put_batch(joined, self.layout.rules, n_vocab))[0]
                rows = take_tokens(logp, self.layout.rules)
                found |= dict(zip(group, np.split(rows, n_joined), strict=False))
        return [found[i] for i in range(len(batches))]

    def warm_up(self, params: Tree, batch: Batch) -> None:
        """Runs the calls for micro-batches of the shape of `batch`."""
        joined = self.n_joined > self.n_least
        self.logps(params, [batch] * (self.n_joined + 1 if joined else 1))

    def _groups(self, indices: list[int]) -> Iterator[tuple[list[int], int]]:
        """(micro-batches of a call, their number with padding)."""
        whole = len(indices) - len(indices) % self.n_joined
        for start in range(0, whole, self.n_joined):
            yield indices[start : start + self.n_joined], self.n_joined
        for start in range(whole, len(indices), self.n_least):
            yield indices[start : min(start + self.n_least, len(indices))], self.n_least


def join_batches(parts: Sequence[Batch]) -> Batch:
    """Host batches of one shape as one batch, with the rows of the first one first."""
    supports = [part.support for part in parts]
    plain = [dataclasses.replace(part, support=None) for part in parts]
    joined = jax.tree.map(lambda *rows: np.concatenate(rows), *plain)
    support = join_packed(supports, size=parts[0].tokens.size)
    return dataclasses.replace(joined, support=support)


def micro_batches_per_call(cfg: RunConfig, layout: Layout, token_budget: int = 0) -> int:
    """Number of micro-batches of training that a role scores in one call.

    `token_budget` is the role's; 0 = training's. Training's mesh is the current one.
    Raises ValueError unless the number of data-parallel ranks of one is a multiple of that of the
    other.
    """
    ours = training_rules(cfg).n_shards("batch")
    with layout.on_mesh():
        theirs = layout.rules.n_shards("batch")
    if max(ours, theirs) % min(ours, theirs):
        raise ValueError(
            f"scoring with {theirs} data-parallel ranks is incompatible with the {ours} ranks of "
            "updates; set sizes in config.score, config.ref and config.mesh so that one number of "
            "ranks is a multiple of the other"
        )
    return max(theirs // ours, 1) * max(token_budget // cfg.learner.token_budget, 1)


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
        self, cfg: RunConfig, optimizer: Optimizer, rules: Rules, objective: MicroBatchLoss
    ):
        self._gradients = functools.partial(loss_gradients, objective, cfg=cfg, rules=rules)
        self._optimizer = optimizer
        self._balances = cfg.learner.router_aux_coef != 0
        self._restricts = cfg.algorithm.keep_sampling_mask
        self.put = functools.partial(put_batch, rules=rules)
        # Changing coefficients are array arguments: as constants they would recompile every step.
        self._adapts = adapts_coefs(cfg)
        self._coefs = Coefs(cfg.algorithm.kl_coef, cfg.algorithm.entropy_coef)
        self._offload = "gradients" in cfg.learner.offload
        self.zeros = jax.jit(
            functools.partial(_zeros, cfg=cfg.algorithm, zero=optimizer.zero, offload=self._offload)
        )
        self.zero_balance = jax.jit(_zero_balance)
        jit = functools.partial(jax.jit, compiler_options=_options(cfg))
        count = functools.partial(count_tokens, cfg=cfg, rules=rules)
        self.count = jit(count, donate_argnames="so_far")
        self.accumulate = jit(self._accumulate, donate_argnames="so_far")
        self.apply = jit(self._apply, donate_argnames="state")

    def update(
        self,
        state: TrainState,
        batches: Sequence[Batch],
        *,
        ref_params: Tree | None = None,
        extra_weight: int | float = 0.0,
        coefs: Coefs | None = None,
        on_micro_batch: Callable[[int], None] | None = None,
    ) -> tuple[TrainState, dict[str, float]]:
        """(next state, metrics). `state` is donated: it must not be used afterwards.

        `extra_weight` counts rollouts without gradient that `batches` leaves out, in the unit of
        `algorithm.aggregation` (`idle_weight`). `coefs` are this update's coefficients of KL and
        entropy, if the config adapts them. `on_micro_batch(i)` is called after micro-batch i. With
        a load-balancing loss a first pass over the micro-batches counts the tokens of each expert
        (learner/router.py).
        """
        total = self.zeros(state.params)
        n_vocab = self.n_vocab(state.params)
        balance = self.balance(state.params, batches, extra_weight)
        for i, batch in enumerate(batches):
            total = self.accumulate(
                state.params,
                ref_params,
                total,
                self.put(batch, n_vocab=n_vocab),
                balance,
                self._arrays(coefs),
            )
            if on_micro_batch is not None:
                jax.block_until_ready(total.sums.weight)
                on_micro_batch(i)
        trained, frozen = split(state.params)  # others may share the frozen: not donated
        state = dataclasses.replace(state, params=trained)
        state, metrics = self.apply(state, total, np.float32(extra_weight))
        state = dataclasses.replace(state, params=combine(state.params, frozen))
        return state, {name: float(value) for name, value in jax.device_get(metrics).items()}

    def n_vocab(self, params: Tree) -> int:
        """Ids in the bitsets of a batch; 0 if the loss does not restrict the policy to them."""
        restricts = self._restricts and "vocab" in params.cfg.heads
        return params.cfg.V if restricts else 0

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
        accumulated = state.params, ref_params, total, batch, balance, self._arrays(None)
        applied = trained_state(state), total, np.float32(0)
        return counting | {
            "accumulate": functools.partial(self.accumulate.lower, *accumulated),
            "apply": functools.partial(self.apply.lower, *applied),
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
        for batch in batches:
            balance = self.count(params, balance, self.put(batch))
        return balance

    @property
    def n_compiled(self) -> int:
        """Number of programs compiled so far; constant after warm-up."""
        programs: tuple[Any, ...] = (
            self.zeros,
            self.zero_balance,
            self.count,
            self.accumulate,
            self.apply,
        )
        return sum(program._cache_size() for program in programs)

    def _arrays(self, coefs: Coefs | None) -> Coefs | None:
        """None if the config fixes the coefficients: then they are constants of the program."""
        return jax.tree.map(np.float32, coefs or self._coefs) if self._adapts else None

    @jax.named_scope("update")
    def _accumulate(
        self,
        params,
        ref_params,
        so_far: GradSums,
        batch: Batch,
        balance: Balance | None = None,
        coefs: Coefs | None = None,
    ) -> GradSums:
        grads, sums = self._gradients(params, ref_params, batch, balance, coefs)
        grads = self._optimizer.zero.shard_gradients(grads)
        sums = so_far.sums + sums
        if self._offload:
            added, squares = add_gradients(so_far.grads, grads)
            return GradSums(added, sums, squares)
        added = jax.tree.map(lambda total, g: total + g.astype(total.dtype), so_far.grads, grads)
        return GradSums(added, sums)

    @jax.named_scope("optimizer")
    def _apply(self, state: TrainState, total: GradSums, extra_weight):
        sums = total.sums
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
        # The barrier keeps XLA from computing both again in the loop of every array.
        keep, factor = jax.lax.optimization_barrier((nonfinite | empty, factor))
        state = apply_gradients(state, total.grads, self._optimizer, keep=keep, factor=factor)
        return state, metrics


def _mesh(params: Tree) -> jax.sharding.Mesh:
    return jax.tree.leaves(params)[0].sharding.mesh


def _zeros(params: Tree, *, cfg: AlgorithmConfig, zero: Zero, offload: bool) -> GradSums:
    grads = jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), split(params)[0])
    grads, sums = zero.shard_gradients(grads), zero_sums(cfg, params.cfg)
    return GradSums(to_host(grads), sums, jnp.zeros(())) if offload else GradSums(grads, sums)


def _zero_balance(params: Tree, extra_weight: jax.Array) -> Balance:
    return Balance(no_load(params.cfg), extra_weight)


def make_update(cfg: RunConfig, optimizer: Optimizer, rules: Rules) -> Update:
    """Update of the policy; `optimizer` must be the one that made the train state."""
    return Update(cfg, optimizer, rules, policy_objective)


def make_value_update(cfg: RunConfig, optimizer: Optimizer, rules: Rules) -> Update:
    """Update of a separate critic; `cfg` is `RunConfig.critic_run`."""
    return Update(cfg, optimizer, rules, value_objective)
