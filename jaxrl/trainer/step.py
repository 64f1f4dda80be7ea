"""One training step: sample -> reward -> experience -> update; and validation."""

import numpy as np

from jaxrl.trainer.coefficients import adapted, coefficient_metrics
from jaxrl.trainer.evaluation import validation_metrics
from jaxrl.trainer.metrics import reward_metrics, sample_records, speed_metrics
from jaxrl.trainer.phases import experience, refresh_reference
from jaxrl.trainer.run import Run
from jaxrl.trainer.sampling import collect, greedy_baselines, reward, sample
from jaxrl.trainer.shaping import scale_metrics, scaled_rewards
from jaxrl.trainer.update import update, update_critic


def train_step(run: Run) -> None:
    """One step on the next prompts.

    Raises Interrupted only before the first update, so that the step can be repeated from its start.
    """
    core, cfg = run.core, run.core.cfg
    with core.timed("step"):
        collected = collect(run)
        rollouts, metrics = collected.chosen(), collected.metrics()
        if cfg.data.skip_solved:
            metrics["data/solved"] = float(core.iterator.n_solved)
        baselines = None
        if cfg.algorithm.advantage == "remax":
            baselines = greedy_baselines(run, rollouts)

        scale = core.reward_scale.updated([r.reward for r in collected.sampled])
        raw_rewards = np.array([r.reward.value for r in rollouts])
        rewards = scaled_rewards(raw_rewards, scale, cfg.reward)
        if baselines is not None:
            baselines = scaled_rewards(baselines, scale, cfg.reward)
        mini_batches, packing = experience(run, rollouts, rewards, baselines)
        metrics |= reward_metrics(collected.sampled)
        metrics |= scale_metrics(raw_rewards, scale, cfg.reward) | packing

        if core.critic is not None:
            metrics |= update_critic(core, core.critic, mini_batches)
        if core.step < cfg.critic.warmup_steps:
            mini_batches = []
        metrics |= update(core, mini_batches)
        metrics |= coefficient_metrics(core.coefs, cfg)
    core.reward_scale = scale
    core.coefs = adapted(core.coefs, metrics, cfg, n_samples=len(rollouts))
    n_tokens = sum(len(r.rollout.prompt.tokens) + len(r.rollout.tokens) for r in collected.sampled)
    metrics |= speed_metrics(core, n_tokens, [p for mini in mini_batches for p in mini.packed])
    core.end_step(metrics)
    if core.refresh_due:
        refresh_reference(core)
    core.logger.samples(core.step, sample_records(collected.sampled, kind="train"))


def validate(run: Run) -> None:
    """Samples the validation prompts with the current weights and logs val/*."""
    core = run.core
    rollouts, _ = sample(run, list(core.val), validation=True)
    rewarded = reward(run, rollouts, validation=True)
    core.validated_at, core.val_metrics = core.step, validation_metrics(rewarded, core.cfg.eval)
    core.logger.metrics(core.step, core.val_metrics | core.take_seconds())
    core.logger.samples(core.step, sample_records(rewarded, kind="val"))
