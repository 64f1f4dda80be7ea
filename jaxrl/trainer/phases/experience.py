"""The experience of a step: training samples with advantages, packed; and their scores."""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
import rich
from rich.text import Text

from jaxrl.data.packing import gather, pack_samples
from jaxrl.learner.critic import ValueScorer
from jaxrl.learner.requirements import (
    needs_old_logp,
    needs_ref_logp,
    needs_role_baselines,
    needs_score_norms,
    policy_is_teacher,
    reads_responses,
    scores_by_teacher,
)
from jaxrl.trainer.core import Core
from jaxrl.trainer.phases.mini_batches import (
    MiniBatch,
    Score,
    make_mini_batches,
    to_samples,
    with_scores,
)
from jaxrl.trainer.phases.parts import given_samples, in_parts, part_metrics
from jaxrl.trainer.phases.rewards import (
    Group,
    RewardScale,
    reward_metrics,
    reward_parts,
    scale_metrics,
    scaled_rewards,
    turn_rewards,
)
from jaxrl.trainer.phases.roles import Baselines, with_role_baselines
from jaxrl.trainer.phases.sampling import Collected
from jaxrl.trainer.phases.self_distillation import with_teacher_prompts
from jaxrl.trainer.phases.teachers import read_by_teachers
from jaxrl.types import Batch, ScoredRollout, TrainingSample
from sharding import hosts, to_device


@dataclasses.dataclass(frozen=True)
class Experience:
    """The input of a step's updates."""

    mini_batches: list[MiniBatch]
    n_samples: int
    reward_scale: RewardScale  # includes the rewards of this step
    role_baselines: Baselines  # the same
    metrics: dict[str, float]


def make_experience(
    core: Core, collected: Collected, groups: Sequence[Group], baselines: np.ndarray | None
) -> Experience:
    """Scales the rewards, computes advantages and packs.

    Advantages may read values, and the reference's logprobs for a KL in the reward; these are
    scored here. `baselines` as from `chosen_groups`. A step without a valid group has no
    mini-batches.
    """
    cfg = core.cfg
    scale = core.reward_scale.updated(collected.sampled)
    metrics = reward_metrics(collected.sampled, cfg.reward)
    metrics["reward/dropped_groups"] = float(collected.n_failed)
    rollouts = [r for group in groups for r in group]
    if not rollouts:
        warn_no_update(core.clock.step + 1, collected.sampled)
        return Experience([], 0, scale, core.role_baselines, metrics)

    raw_rewards = np.array([r.reward.value for r in rollouts])
    metrics |= scale_metrics(raw_rewards, scale, cfg.reward)
    if baselines is not None:
        baselines = scaled_rewards(baselines, scale, cfg.reward)
    sampled = [
        to_samples(r.rollout, cfg.algorithm, group=i, turn_rewards=turn_rewards(r, scale, cfg))
        for i, group in enumerate(groups)
        for r in group
    ]
    if cfg.algorithm.parts:
        pairs = zip(sampled, rollouts, strict=True)
        sampled = [in_parts(episode, r.rollout, cfg.algorithm) for episode, r in pairs]
    samples = [s for episode in sampled for s in episode]
    n_samples = [len(episode) for episode in sampled]  # all with the reward of the episode
    rewards = np.repeat(scaled_rewards(raw_rewards, scale, cfg.reward), n_samples)
    if baselines is not None:
        baselines = np.repeat(baselines, n_samples)
    if cfg.self_distillation.context:
        samples, context = with_teacher_prompts(samples, groups, cfg, core.models.renderer)
        metrics |= context
    if reads_responses(cfg):
        samples, read = read_by_teachers(core, samples)
        metrics |= read
    demonstrations = []
    if core.demonstrations:
        given = core.demonstrations.of_step(core.clock.step)
        demonstrations = given_samples(given, cfg.algorithm)
    if core.learner.value_scorer is not None:
        samples = add_values(core, core.learner.value_scorer, samples)
    role_baselines = core.role_baselines
    if needs_role_baselines(cfg):
        decay = cfg.algorithm.role_decay
        samples, role_baselines = with_role_baselines(samples, role_baselines, decay)
        metrics |= {f"role_baseline/{name}": value for name, value in role_baselines.items()}
    if needs_score_norms(cfg):
        samples = add_score_norms(core, samples)
    with core.clock.timed("adv"), core.no_compile("scoring"):
        mini_batches, more_metrics = make_mini_batches(
            samples,
            rewards,
            cfg,
            n_ranks=core.learner.n_ranks,
            kl_reference=reference_score(core, kl_in="reward"),
            baselines=baselines,
            parts=reward_parts(rollouts, n_samples, cfg),
            kl_coef=core.coefs.kl,
            seed=core.sampling_seed(validation=False),
            step=core.clock.step,
            demonstrations=demonstrations,
        )
    metrics |= more_metrics
    if cfg.algorithm.parts:
        metrics |= part_metrics([*samples, *demonstrations], core.clock.step, cfg.algorithm)
    return Experience(mini_batches, len(rollouts), scale, role_baselines, metrics)


def score(core: Core, mini_batches: list[MiniBatch]) -> list[MiniBatch]:
    """Fills the logprobs of the policy before its updates and of the reference, as needed."""
    if not mini_batches:
        return []
    score_old = functools.partial(with_policy_logps, core) if needs_old_logp(core.cfg) else None
    score_ref = reference_score(core, kl_in="loss")
    with core.clock.timed("adv"), core.no_compile("scoring"):
        return with_scores(
            mini_batches, core.cfg.algorithm, score_old=score_old, score_ref=score_ref
        )


def reference_score(core: Core, *, kl_in: str) -> Score | None:
    """Scores batches by the model of the KL at this place; None if there is none."""
    if core.cfg.algorithm.kl_in != kl_in:
        return None
    if policy_is_teacher(core.cfg):
        return functools.partial(policy_logps, core)
    if scores_by_teacher(core.cfg):
        return given_logps
    return functools.partial(reference_logps, core) if needs_ref_logp(core.cfg) else None


def warn_no_update(step: int, rollouts: Sequence[ScoredRollout]) -> None:
    """Prints that no group of the step has enough valid samples."""
    n_failed = sum(bool(r.error) for r in rollouts)
    text = (
        f"warning: step {step}: no update, because no prompt has enough valid rewards: "
        f"{n_failed} of {len(rollouts)} responses failed"
    )
    if hosts.is_main_process():
        rich.get_console().print(Text(text, "bold yellow"), soft_wrap=True)


def add_values(
    core: Core, scorer: ValueScorer, samples: Sequence[TrainingSample]
) -> list[TrainingSample]:
    """Fills `values` with the critic's value of every response token."""
    packed = pack_samples(samples, scorer.cfg, scorer.n_ranks)
    with core.clock.timed("values"), core.no_compile("scoring"):
        params = core.state.params if core.learner.critic is None else core.learner.critic.params
        values = gather(scorer.values(params, packed, on_batch=core.check_stop), packed)
    return [dataclasses.replace(s, values=v) for s, v in zip(samples, values, strict=True)]


def add_score_norms(core: Core, samples: Sequence[TrainingSample]) -> list[TrainingSample]:
    """Fills `score_norms` with 1 - 2 π(y_t) + Σ π² under the policy before the step."""
    packed = pack_samples(samples, core.cfg, core.learner.n_ranks)
    with core.no_compile("scoring"):
        found = policy_collisions(core, [p.batch for p in packed])
    norms = gather([1.0 - 2.0 * np.exp(p) + np.exp(square) for p, square in found], packed)
    return [dataclasses.replace(s, score_norms=x) for s, x in zip(samples, norms, strict=True)]


def policy_logps(core: Core, batches: Sequence[Batch]) -> list[np.ndarray]:
    """The policy's logprobs [B, T] of each packed batch."""
    return [batch.old_logp for batch in with_policy_logps(core, batches)]


def policy_collisions(core: Core, batches: Sequence[Batch]) -> list[tuple[np.ndarray, ...]]:
    """The policy's (logprobs, log Σ π² over the vocabulary) [B, T] of each packed batch."""
    layout = core.learner.scorer.layout
    with (
        layout.weights(core.state.params, core.clock.timed("reshard")) as params,
        core.clock.timed("old_log_prob"),
    ):
        return core.learner.scorer.with_collisions(params, batches, on_batch=core.check_stop)


def with_policy_logps(core: Core, batches: Sequence[Batch]) -> list[Batch]:
    """The packed batches with the policy's logprobs and, with router replay R2, its experts."""
    layout = core.learner.scorer.layout
    with (
        layout.weights(core.state.params, core.clock.timed("reshard")) as params,
        core.clock.timed("old_log_prob"),
    ):
        return core.learner.scorer.with_old_logp(params, batches, on_batch=core.check_stop)


def given_logps(batches: Sequence[Batch]) -> list[np.ndarray]:
    """The logprobs [B, T] that teachers gave the samples of each packed batch."""
    return [batch.ref_logp for batch in batches]


def reference_logps(core: Core, batches: Sequence[Batch]) -> list[np.ndarray]:
    """The reference model's logprobs [B, T] of each packed batch."""
    with core.learner.ref_scorer.layout.on_mesh(), core.clock.timed("ref"):
        params = to_device(core.ref_params)
        return core.learner.ref_scorer.logps(params, batches, on_batch=core.check_stop)
