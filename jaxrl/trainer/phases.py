"""Scores the rollouts of a step with the policy, the reference model and the critic."""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from jaxrl.data.packing import gather
from jaxrl.learner.critic import Values
from jaxrl.learner.requirements import needs_old_logp, needs_ref_logp
from jaxrl.trainer.experience import MiniBatch, make_mini_batches, pack_samples, to_sample
from jaxrl.trainer.run import Job, Run
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
    cfg = run.cfg
    samples = [to_sample(r.rollout) for r in rollouts]
    if run.values is not None:
        samples = add_values(run, run.values, samples)
    with run.timed("adv"), run.no_compile("scoring"):
        return make_mini_batches(
            samples,
            rewards,
            cfg,
            n_ranks=run.n_ranks,
            score_old=functools.partial(policy_logps, run) if needs_old_logp(cfg) else None,
            score_ref=functools.partial(reference_logps, run) if needs_ref_logp(cfg) else None,
            baselines=baselines,
            kl_coef=run.coefs.kl,
            seed=run.sampling_seed(validation=False),
        )


def add_values(run: Job, values: Values, samples: Sequence[TrainingSample]) -> list[TrainingSample]:
    """Fills `values` with the critic's value of every response token."""
    params = run.state.params if run.critic is None else run.critic.state.params
    packed = pack_samples(samples, values.cfg, values.n_ranks)
    with run.timed("values"), run.no_compile("scoring"):
        found = gather(values.of(params, packed, on_batch=run.check_stop), packed)
    return [dataclasses.replace(s, values=v) for s, v in zip(samples, found, strict=True)]


def policy_logps(run: Job, batches: Sequence[Batch]) -> list[np.ndarray]:
    """The policy's logprobs of packed batches, [B, T] each."""
    layout = run.scorer.layout
    with (
        layout.weights(run.state.params, run.timed("reshard")) as params,
        run.timed("old_log_prob"),
    ):
        return run.scorer.logps(params, batches, on_batch=run.check_stop)


def reference_logps(run: Job, batches: Sequence[Batch]) -> list[np.ndarray]:
    """The reference model's logprobs of packed batches, [B, T] each."""
    with run.ref_scorer.layout.on_mesh(), run.timed("ref"):
        params = to_device(run.ref_params)
        return run.ref_scorer.logps(params, batches, on_batch=run.check_stop)


def refresh_reference(run: Job) -> None:
    """Replaces the reference model by the current policy."""
    with run.timed("ref"):
        ref = run.ref_scorer.layout.copy(run.state.params)
        run.ref_params = to_host(ref) if "reference" in run.cfg.learner.offload else ref
