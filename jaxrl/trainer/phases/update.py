"""Optimizer updates of a step: policy, separate critic and reference model."""

import collections
import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.algorithms.losses.aggregation import sequences_weight
from jaxrl.data.packing import Packed, pack_samples
from jaxrl.learner.critic import Critic
from jaxrl.learner.policy_objective import START_METRICS
from jaxrl.learner.requirements import full_kl_in_loss, needs_old_logp
from jaxrl.trainer.core import Core
from jaxrl.trainer.phases.mini_batches import MiniBatch
from jaxrl.trainer.phases.parts import with_trained_parts
from jaxrl.types import Tree
from sharding import hosts, to_device, to_host

CRITIC_METRICS = {"optim/grad_norm": "critic/grad_norm", "optim/lr": "critic/lr"}


class NonFiniteError(FloatingPointError):
    """The loss or its gradient is not finite. The update was not applied."""


def update(core: Core, mini_batches: Sequence[MiniBatch]) -> dict[str, float]:
    """Runs all optimizer updates of the policy in a step; returns metrics averaged over them.

    Skips mini-batches in which no sample has a gradient.
    """
    cfg = core.cfg
    work = [mini for mini in mini_batches if mini.packed] * cfg.learner.epochs
    metrics: list[dict[str, float]] = []
    with (
        core.clock.timed("update_actor"),
        core.no_compile("update"),
        core.session.progress.phase("update", total=sum(len(mini.packed) for mini in work)) as bar,
    ):
        ref_params = to_device(core.ref_params) if full_kl_in_loss(cfg) else None
        for mini in work:
            batches = [packed.batch for packed in mini.packed]
            core.state, one = core.learner.update.update(
                core.state,
                batches,
                ref_params=ref_params,
                extra_weight=mini.extra_weight,
                coefs=dataclasses.replace(
                    core.coefs.loss_coefs(), mean_weight=mini.mean_weight, parts=mini.part_factors
                ),
                on_micro_batch=lambda i: bar.advance(1),
            )
            if cfg.check_finite:
                check_finite(one, mini.packed, core.cfg.run_path, core.clock.step + 1)
            core.clock.step_restartable = False
            if cfg.algorithm.parts:
                one = with_trained_parts(one, batches, cfg.algorithm)
            metrics.append(one)
    if not needs_old_logp(cfg):
        metrics = with_first_mismatch(metrics)
    return average_updates(metrics) | {"perf/n_updates": float(len(metrics))}


def update_critic(
    core: Core, critic: Critic, mini_batches: Sequence[MiniBatch]
) -> dict[str, float]:
    """Runs all updates of a separate critic in a step; returns metrics averaged over them.

    Responses without loss tokens have no value loss; a mini-batch of these alone is skipped.
    """
    cfg, n_ranks = critic.scorer.cfg, critic.scorer.n_ranks
    trained = [[s for s in mini.samples if s.n_loss_tokens] for mini in mini_batches]
    packs = [pack_samples(samples, cfg, n_ranks) for samples in trained if samples]
    work = packs * cfg.learner.epochs
    metrics: list[dict[str, float]] = []
    with (
        core.clock.timed("update_critic"),
        core.no_compile("critic"),
        core.session.progress.phase("critic", total=sum(map(len, work))) as bar,
        critic.training(),
    ):
        for packed in work:
            critic.state, one = critic.update.update(
                critic.state,
                [micro.batch for micro in packed],
                extra_weight=sequences_weight([], mode=cfg.algorithm.aggregation),
                on_micro_batch=lambda i: bar.advance(1),
            )
            one = {CRITIC_METRICS.get(name, name): value for name, value in one.items()}
            if core.cfg.check_finite:
                check_finite(one, packed, core.cfg.run_path, core.clock.step + 1)
            core.clock.step_restartable = False
            metrics.append({n: value for n, value in one.items() if n.startswith("critic/")})
    return average_updates(metrics)


def refresh_reference(core: Core) -> None:
    """Replaces the reference model by the current policy, or moves it towards the policy."""
    layout, rate = core.learner.ref_scorer.layout, core.cfg.algorithm.ref_refresh_rate
    with core.clock.timed("ref"):
        ref = layout.copy(core.state.params)
        if rate < 1.0:
            with layout.on_mesh():
                ref = moved(to_device(core.ref_params), ref, rate=rate)
        core.reference = to_host(ref) if "reference" in core.cfg.learner.offload else ref
        load_reference_towers(core)


def load_reference_towers(core: Core) -> None:
    """Gives the towers of the reference and of teachers to their encoders, except the policy's."""
    pairs = [(core.learner.ref_scorer, core.ref_params)]
    pairs += [
        (teacher.scorer, params)
        for teacher, params in zip(core.learner.teachers, core.more_references, strict=False)
    ]
    for scorer, ref in pairs:
        encoder = scorer.encoder
        if encoder is not None and encoder is not core.learner.encoder and ref is not None:
            encoder.load(ref.tower)


@functools.partial(jax.jit, static_argnames="rate", donate_argnums=1)
def moved(reference: Tree, policy: Tree, *, rate: float) -> Tree:
    """rate policy + (1 - rate) reference, in float32: TR-DPO's soft update.

    https://arxiv.org/abs/2404.09656
    """

    def mix(old: jax.Array, new: jax.Array) -> jax.Array:
        mixed = rate * new.astype(jnp.float32) + (1.0 - rate) * old.astype(jnp.float32)
        return mixed.astype(old.dtype)

    return jax.tree.map(mix, reference, policy)


def with_first_mismatch(metrics: Sequence[dict[str, float]]) -> list[dict[str, float]]:
    """The metrics of each update, with `START_METRICS` in the first one only.

    Without scored logprobs of the policy at the start of the step, an update compares the engine
    with the current policy, which is the same policy only before the first update.
    """
    later = [{n: x for n, x in one.items() if n not in START_METRICS} for one in metrics[1:]]
    return [*metrics[:1], *later]


def average_updates(metrics: Sequence[dict[str, float]]) -> dict[str, float]:
    """Means over the updates of a step that have the metric; maxima for metrics named *_max."""
    values: dict[str, list[float]] = collections.defaultdict(list)
    for one in metrics:
        for name, value in one.items():
            values[name].append(value)
    return {
        name: max(found) if name.endswith("_max") else float(np.mean(found))
        for name, found in values.items()
    }


def check_finite(
    metrics: dict[str, float], micro_batches: Sequence[Packed], folder: Path, step: int
) -> None:
    """Raises NonFiniteError if an update was not finite, after writing its batch to `folder`."""
    if not metrics["optim/nonfinite"]:
        return
    path = folder / f"nonfinite_step_{step}.npz"
    arrays = {}
    for i, packed in enumerate(micro_batches):
        fields = dict(vars(packed.batch))
        for kind in ("support", "experts", "teacher"):
            if (sparse := fields.pop(kind)) is not None:
                fields |= {f"{kind}_{name}": values for name, values in vars(sparse).items()}
        arrays |= {f"{i}/{name}": np.asarray(x) for name, x in fields.items() if x is not None}
    if hosts.is_main_process():
        np.savez_compressed(path, allow_pickle=False, **arrays)
    wrong = [name for name, value in metrics.items() if not np.isfinite(value)]
    raise NonFiniteError(
        f"step {step}: {', '.join(sorted(wrong))} not finite; the update was not applied. Its "
        f"batch is saved in {path}. Inspect the batch, lower config.learner.lr or "
        "config.learner.clip_norm in a new run, or resume this run with "
        "--config.check_finite=False, which skips such updates"
    )
