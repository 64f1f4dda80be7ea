"""One training step of an RL run: rollout, reward, experience, score, update. And validation."""

from collections.abc import Sequence

from jaxrl.learner.coefficients import adapt_coefficients, coefficient_metrics
from jaxrl.trainer.core import Run
from jaxrl.trainer.evaluation import validation_metrics
from jaxrl.trainer.first_samples import show_first_samples
from jaxrl.trainer.phases.experience import make_experience, score
from jaxrl.trainer.phases.rewards import RewardsFailed
from jaxrl.trainer.phases.sampling import (
    Collected,
    chosen_groups,
    collect,
    end_rollouts,
    reward,
    sample,
)
from jaxrl.trainer.phases.update import refresh_reference, update, update_critic
from jaxrl.types import ScoredRollout


def train_step(run: Run) -> None:
    """One step on the next prompts.

    Raises Interrupted and RewardsFailed only before the first update, so the step can be repeated
    from its start.
    """
    core, cfg = run.core, run.core.cfg
    with core.clock.timed("step"):
        collected = Collected(cfg)
        while not collected.full:
            rollouts = run.source.rollout(run, draw=collected.n_batches)
            collect(run, collected, *run.source.reward(run, rollouts))
        where = f"step {core.clock.step + 1}"
        check_rewards(run, collected.sampled, where, step=core.clock.step + 1, kind="train")
        if core.clock.step == 0:
            show_first_samples(core, [scored.rollout for scored in collected.sampled])
        groups, baselines = chosen_groups(run, collected)
        end_rollouts(run)

        experience = make_experience(core, collected, groups, baselines)
        mini_batches = scored = score(core, experience.mini_batches)
        metrics = collected.metrics() | experience.metrics
        if core.learner.critic is not None:
            metrics |= update_critic(core, core.learner.critic, mini_batches)
        if core.clock.step < cfg.critic.warmup_steps:
            mini_batches = []  # critic warm-up: the policy is not updated
        metrics |= update(core, mini_batches)
        metrics |= coefficient_metrics(core.coefs, cfg) | core.length_stage.metrics(cfg.data)

    core.reward_scale, core.role_baselines = experience.reward_scale, experience.role_baselines
    core.coefs = adapt_coefficients(core.coefs, metrics, cfg, n_samples=experience.n_samples)
    core.length_stage = core.length_stage.after_step(metrics, cfg.data)
    core.in_flight = run.source.in_flight()
    trained = [packed for mini in mini_batches for packed in mini.packed]
    core.end_step(metrics, n_tokens=collected.n_tokens, trained=trained)
    if core.clock.refresh_due:
        refresh_reference(core)
    core.log_samples(core.clock.step, collected.sampled, kind="train", trained=scored)


def validate(run: Run) -> None:
    """Samples and rewards the validation prompts with the current weights, and logs val/*.

    Raises RewardsFailed.
    """
    core, clock = run.core, run.core.clock
    rollouts, _ = sample(run, list(core.val), validation=True)
    end_rollouts(run)
    scored = reward(run, rollouts, validation=True)
    check_rewards(run, scored, f"validation after step {clock.step}", step=clock.step, kind="val")
    clock.validated_at, clock.val_metrics = clock.step, validation_metrics(scored, core.cfg.eval)
    core.logger.metrics(clock.step, clock.val_metrics | clock.take_seconds())
    core.log_samples(clock.step, scored, kind="val")


def check_rewards(
    run: Run, scored: Sequence[ScoredRollout], where: str, *, step: int, kind: str
) -> None:
    """Raises RewardsFailed if too many have failed, after logging the samples it mentions."""
    try:
        run.reward_errors.check(scored, where)
    except RewardsFailed:
        run.core.log_samples(step, scored, kind=kind)
        raise
