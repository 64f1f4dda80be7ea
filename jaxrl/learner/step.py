"""Scoring and updating, compiled: the only place where the learner meets jax.jit."""

import collections
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct

from jaxrl.config.keys import AlgorithmConfig, RunConfig
from jaxrl.data.packing import empty_batch
from jaxrl.layout import Layout, training_rules
from jaxrl.learner.loss import (
    count_tokens,
    policy_loss_sums,
    score_tokens,
    score_values,
    value_loss_sums,
)
from jaxrl.learner.optimizer import Optimizer, clip_factor
from jaxrl.learner.policy_objective import Coefs, LossSums, zero_sums
from jaxrl.learner.requirements import adapts_coefs
from jaxrl.learner.router import Balance, no_load, router_metrics
from jaxrl.learner.state import apply_gradients
from jaxrl.learner.xla import compiler_options
from jaxrl.types import Batch, TrainState, Tree
from sharding import Rules, hosts, mesh_order, on_mesh, row_order, target_platform, tree

# (params, ref_params, batch, balance, coefs, cfg=, rules=) -> (loss, LossSums)
Loss = Callable[..., tuple[jax.Array, LossSums]]


@struct.dataclass
class GradSums:
    """Gradient of the summed loss, float32, and the sums that go with it."""

    grads: Tree
    sums: LossSums


def put_batch(batch: Batch, rules: Rules) -> Batch:
    """A host batch onto the mesh: rows over the data-parallel axes, tokens in the order of the rules.
    Every process passes the whole batch."""
    ordered = jax.tree.map(lambda rows: mesh_order(rows, rules), batch)
    return tree.put_batch(ordered, rules.spec("batch", "time"))


def take_tokens(per_token: jax.Array, rules: Rules) -> np.ndarray:
    """A result [B, T] of the mesh on the host, tokens in their own order."""
    return row_order(hosts.host_array(per_token), rules)


def make_score(cfg: RunConfig, rules: Rules) -> Callable:
    """score(params, batch) -> (logp, entropy) [B, T] of the targets, jitted; `take_tokens` reads them."""
    return jax.jit(
        functools.partial(score_tokens, cfg=cfg, rules=rules), compiler_options=_options(cfg)
    )


def make_values(cfg: RunConfig, rules: Rules) -> Callable:
    """values(params, batch) -> [B, T] of the states in which the targets were sampled, jitted."""
    return jax.jit(
        functools.partial(score_values, cfg=cfg, rules=rules), compiler_options=_options(cfg)
    )


class Scorer:
    """Logprobs by a role with a layout of its own."""

    def __init__(self, cfg: RunConfig, layout: Layout):
        self.layout = layout
        self.score = make_score(cfg, layout.rules)
        self._n_joined = joined_batches(cfg, layout)

    def logps(
        self,
        params: Tree,
        batches: Sequence[Batch],
        on_batch: Callable[[], None] = lambda: None,
    ) -> list[np.ndarray]:
        """[B, T] of each of training's micro-batches, of weights that lie as the layout says, on its mesh.

        Where the role has more data-parallel ranks than training, as many more micro-batches of one shape
        go through together, so that a rank has as many rows. `on_batch` is called before each call.
        """
        by_shape = collections.defaultdict(list)
        for i, batch in enumerate(batches):
            by_shape[batch.tokens.shape].append(i)
        found: dict[int, np.ndarray] = {}
        for shape, places in by_shape.items():
            for start in range(0, len(places), self._n_joined):
                group = places[start : start + self._n_joined]
                padding = [empty_batch(*shape)] * (self._n_joined - len(group))
                parts = [*(batches[i] for i in group), *padding]
                joined = jax.tree.map(lambda *rows: np.concatenate(rows), *parts)
                on_batch()
                logp = self.score(params, put_batch(joined, self.layout.rules))[0]
                rows = take_tokens(logp, self.layout.rules)
                found |= dict(zip(group, np.split(rows, self._n_joined), strict=False))
        return [found[i] for i in range(len(batches))]


def joined_batches(cfg: RunConfig, layout: Layout) -> int:
    """Micro-batches of training that a role scores in one call; training's mesh is set.

    Raises ValueError where the data-parallel ranks of neither are a multiple of the other's.
    """
    ours = training_rules(cfg).n_shards("batch")
    with layout.on_mesh():
        theirs = layout.rules.n_shards("batch")
    if max(ours, theirs) % min(ours, theirs):
        raise ValueError(
            f"scoring with {theirs} data-parallel ranks does not go with the {ours} of updates; set sizes in "
            "config.score, config.ref and config.mesh of which one number is a multiple of the other"
        )
    return max(theirs // ours, 1)


def _options(cfg: RunConfig) -> dict[str, Any] | None:
    return compiler_options(cfg.learner.xla, target_platform()) or None


class Update:
    """One optimizer step over any number of micro-batches.

    `accumulate` adds the gradient of a micro-batch to the running sums, `apply` divides once by the
    weight of all of them. So the step does not depend on how the rollouts were cut and packed. A step
    whose loss or gradient is not finite changes nothing and says so in optim/nonfinite.
    """

    def __init__(self, cfg: RunConfig, optimizer: Optimizer, rules: Rules, loss: Loss):
        self._loss = functools.partial(loss, cfg=cfg, rules=rules)
        self._optimizer = optimizer
        self._balances = cfg.learner.router_aux_coef != 0
        self.put = functools.partial(put_batch, rules=rules)
        # As arrays where they change: as constants they would compile anew in every step.
        self._adapts = adapts_coefs(cfg)
        self._coefs = Coefs(cfg.algorithm.kl_coef, cfg.algorithm.entropy_coef)
        self.zeros = jax.jit(functools.partial(_zeros, cfg=cfg.algorithm))
        self.uncounted = jax.jit(_uncounted)
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
        """(next state, metrics). `state` is donated: nothing of it may be used afterwards.

        `extra_weight` counts rollouts without a gradient that were left out of `batches`, in the unit
        of `algorithm.aggregation` (`idle_weight`). `coefs` are this update's weights of KL and entropy,
        where the config adapts them. `on_micro_batch(i)` is called when micro-batch i is
        done. With a load-balancing loss a first pass over the micro-batches counts the tokens of each
        expert (learner/router.py).
        """
        total = self.zeros(state.params)
        balance = self.balance(state.params, batches, extra_weight)
        for i, batch in enumerate(batches):
            total = self.accumulate(
                state.params, ref_params, total, self.put(batch), balance, self._arrays(coefs)
            )
            if on_micro_batch is not None:
                jax.block_until_ready(total.sums.weight)
                on_micro_batch(i)
        state, metrics = self.apply(state, total, np.float32(extra_weight))
        return state, {name: float(value) for name, value in jax.device_get(metrics).items()}

    def lower(
        self, state: TrainState, batch: Batch, ref_params: Tree | None = None
    ) -> dict[str, jax.stages.Lowered]:
        """The programs of an update of (abstract) arguments, to compile ahead of the first call."""
        mesh = jax.tree.leaves(state.params)[0].sharding.mesh
        total = on_mesh(jax.eval_shape(self.zeros, state.params), mesh)
        balance, counting = None, {}
        if self._balances:
            uncounted = jax.eval_shape(self.uncounted, state.params, np.float32(0))
            balance = on_mesh(uncounted, mesh)
            counting = {"count": self.count.lower(state.params, balance, batch)}
        return counting | {
            "accumulate": self.accumulate.lower(
                state.params, ref_params, total, batch, balance, self._arrays(None)
            ),
            "apply": self.apply.lower(state, total, np.float32(0)),
        }

    def balance(
        self, params: Tree, batches: Sequence[Batch], extra_weight: int | float = 0.0
    ) -> Balance | None:
        """What the micro-batches together send to the experts; None without a load-balancing loss."""
        if not self._balances:
            return None
        balance = self.uncounted(params, np.float32(extra_weight))
        for batch in batches:
            balance = self.count(params, balance, self.put(batch))
        return balance

    @property
    def n_compiled(self) -> int:
        """Programs compiled by the calls so far; it stops growing after warm-up."""
        programs: tuple[Any, ...] = (
            self.zeros,
            self.uncounted,
            self.count,
            self.accumulate,
            self.apply,
        )
        return sum(program._cache_size() for program in programs)

    def _arrays(self, coefs: Coefs | None) -> Coefs | None:
        """None where the config fixes the weights: then they are constants of the program."""
        return jax.tree.map(np.float32, coefs or self._coefs) if self._adapts else None

    def _accumulate(
        self,
        params,
        ref_params,
        so_far: GradSums,
        batch: Batch,
        balance: Balance | None = None,
        coefs: Coefs | None = None,
    ) -> GradSums:
        def loss(params):
            return self._loss(params, ref_params, batch, balance, coefs)

        (_, sums), grads = jax.value_and_grad(loss, has_aux=True)(params)
        added = jax.tree.map(lambda total, g: total + g.astype(total.dtype), so_far.grads, grads)
        return GradSums(added, so_far.sums + sums)

    def _apply(self, state: TrainState, total: GradSums, extra_weight):
        sums = total.sums
        weight = sums.weight + extra_weight
        norm = optax.tree.norm(total.grads) / weight
        factor = clip_factor(norm, self._optimizer.clip_norm) / weight
        grads = jax.tree.map(lambda g: g * factor, total.grads)
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
        return apply_gradients(state, grads, self._optimizer, keep=nonfinite), metrics


def _zeros(params: Tree, *, cfg: AlgorithmConfig) -> GradSums:
    grads = jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), params)
    return GradSums(grads, zero_sums(cfg, params.cfg))


def _uncounted(params: Tree, extra_weight: jax.Array) -> Balance:
    return Balance(no_load(params.cfg), extra_weight)


def make_update(cfg: RunConfig, optimizer: Optimizer, rules: Rules) -> Update:
    """The policy's update; `optimizer` is that of its train state."""
    return Update(cfg, optimizer, rules, policy_loss_sums)


def make_value_update(cfg: RunConfig, optimizer: Optimizer, rules: Rules) -> Update:
    """The update of a critic of its own; `cfg` is `RunConfig.critic_run`."""
    return Update(cfg, optimizer, rules, _values_alone)


def _values_alone(
    params, ref_params, batch: Batch, balance, coefs, *, cfg: RunConfig, rules: Rules
):
    return value_loss_sums(params, batch, cfg=cfg, rules=rules)
