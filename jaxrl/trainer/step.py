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
    cfg = run.cfg
    with run.timed("step"):
        collected = collect(run)
        rollouts, metrics = collected.chosen(), collected.metrics()
        if cfg.data.skip_solved:
            metrics["data/solved"] = float(run.iterator.n_solved)
        baselines = None
        if cfg.algorithm.advantage == "remax":
            baselines = greedy_baselines(run, rollouts)

        scale = run.reward_scale.updated([r.reward for r in collected.sampled])
        raw_rewards = np.array([r.reward.value for r in rollouts])
        rewards = scaled_rewards(raw_rewards, scale, cfg.reward)
        if baselines is not None:
            baselines = scaled_rewards(baselines, scale, cfg.reward)
        mini_batches, packing = experience(run, rollouts, rewards, baselines)
        metrics |= reward_metrics(collected.sampled)
        metrics |= scale_metrics(raw_rewards, scale, cfg.reward) | packing

        if run.critic is not None:
            metrics |= update_critic(run, run.critic, mini_batches)
        if run.step < cfg.critic.warmup_steps:
            mini_batches = []
        metrics |= update(run, mini_batches)
        metrics |= coefficient_metrics(run.coefs, cfg)
    run.reward_scale = scale
    run.coefs = adapted(run.coefs, metrics, cfg, n_samples=len(rollouts))
    n_tokens = sum(len(r.rollout.prompt.tokens) + len(r.rollout.tokens) for r in collected.sampled)
    metrics |= speed_metrics(run, n_tokens, [p for mini in mini_batches for p in mini.packed])
    run.end_step(metrics)
    if run.refresh_due:
        refresh_reference(run)
    run.logger.samples(run.step, sample_records(collected.sampled, kind="train"))


def validate(run: Run) -> None:
    """Samples the validation prompts with the current weights and logs val/*."""
    rollouts, _ = sample(run, list(run.val), validation=True)
    rewarded = reward(run, rollouts, validation=True)
    run.validated_at, run.val_metrics = run.step, validation_metrics(rewarded, run.cfg.eval)
    run.logger.metrics(run.step, run.val_metrics | run.take_seconds())
    run.logger.samples(run.step, sample_records(rewarded, kind="val"))
