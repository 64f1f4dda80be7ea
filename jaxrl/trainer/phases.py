"""Scores the rollouts of a step with the policy, the reference model and the critic."""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from jaxrl.data.packing import gather
from jaxrl.learner.critic import ValueScorer
from jaxrl.learner.requirements import needs_old_logp, needs_ref_logp
from jaxrl.trainer.experience import MiniBatch, make_mini_batches, pack_samples, to_sample
from jaxrl.trainer.run import Core, Run
from jaxrl.types import Batch, ScoredRollout, TrainingSample
from sharding import to_device, to_host


def experience(
    run: Run,
    rollouts: Sequence[ScoredRollout],
    rewards: np.ndarray,
    baselines: np.ndarray | None,
) -> tuple[list[MiniBatch], dict[str, float]]:
    """Values, advantages, packing, and the logprobs that the algorithm needs before its first update.

    `rewards` and `baselines` are float64 [len(rollouts)], after scaling.
    """
    core = run.core
    cfg = core.cfg
    samples = [to_sample(r.rollout) for r in rollouts]
    if core.value_scorer is not None:
        samples = add_values(core, core.value_scorer, samples)
    with core.timed("adv"), core.no_compile("scoring"):
        return make_mini_batches(
            samples,
            rewards,
            cfg,
            n_ranks=core.n_ranks,
            score_old=functools.partial(policy_logps, core) if needs_old_logp(cfg) else None,
            score_ref=functools.partial(reference_logps, core) if needs_ref_logp(cfg) else None,
            baselines=baselines,
            kl_coef=core.coefs.kl,
            seed=core.sampling_seed(validation=False),
        )


def add_values(
    core: Core, scorer: ValueScorer, samples: Sequence[TrainingSample]
) -> list[TrainingSample]:
    """Fills `values` with the critic's value of every response token."""
    params = core.state.params if core.critic is None else core.critic.state.params
    packed = pack_samples(samples, scorer.cfg, scorer.n_ranks)
    with core.timed("values"), core.no_compile("scoring"):
        found = gather(scorer.values(params, packed, on_batch=core.check_stop), packed)
    return [dataclasses.replace(s, values=v) for s, v in zip(samples, found, strict=True)]


def policy_logps(core: Core, batches: Sequence[Batch]) -> list[np.ndarray]:
    """The policy's logprobs of packed batches, [B, T] each."""
    layout = core.scorer.layout
    with (
        layout.weights(core.state.params, core.timed("reshard")) as params,
        core.timed("old_log_prob"),
    ):
        return core.scorer.logps(params, batches, on_batch=core.check_stop)


def reference_logps(core: Core, batches: Sequence[Batch]) -> list[np.ndarray]:
    """The reference model's logprobs of packed batches, [B, T] each."""
    with core.ref_scorer.layout.on_mesh(), core.timed("ref"):
        params = to_device(core.ref_params)
        return core.ref_scorer.logps(params, batches, on_batch=core.check_stop)


def refresh_reference(core: Core) -> None:
    """Replaces the reference model by the current policy."""
    with core.timed("ref"):
        ref = core.ref_scorer.layout.copy(core.state.params)
        core.ref_params = to_host(ref) if "reference" in core.cfg.learner.offload else ref
