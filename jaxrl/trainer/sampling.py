"""Samples and rewards the rollouts of a step, with dynamic sampling and the ReMax baseline."""

import dataclasses

import numpy as np

from jaxrl.config.keys import RunConfig
from jaxrl.trainer.run import Run
from jaxrl.trainer.scoring import score
from jaxrl.trainer.shaping import (
    Group,
    add_overlong_penalty,
    solved_prompts,
    split_flat,
    split_groups,
)
from jaxrl.types import Prompt, Rollout, ScoredRollout


@dataclasses.dataclass
class Collected:
    """The rollouts of a step, collected over one or more batches of prompts."""

    cfg: RunConfig
    sampled: list[ScoredRollout] = dataclasses.field(default_factory=list)  # all, penalties added
    kept: list[Group] = dataclasses.field(default_factory=list)  # before the overlong penalty
    dropped: list[Group] = dataclasses.field(default_factory=list)  # by dynamic sampling
    engine_metrics: list[dict[str, float]] = dataclasses.field(default_factory=list)  # per batch

    def add(self, groups: list[Group], engine_metrics: dict[str, float]) -> None:
        """Adds one batch of prompts. Dynamic sampling compares rewards before the overlong penalty."""
        algo = self.cfg.algorithm
        kept, dropped = groups, []
        if algo.dynamic_sampling:
            kept, dropped = split_flat(groups, algo.dynamic_sampling_range)
        self.kept += kept
        self.dropped += dropped
        self.sampled += add_overlong_penalty([r for group in groups for r in group], self.cfg)
        self.engine_metrics.append(engine_metrics)

    @property
    def full(self) -> bool:
        return len(self.kept) >= self.cfg.data.prompts_per_step

    def chosen(self) -> list[ScoredRollout]:
        """The rollouts to train on; dropped groups fill up what is missing."""
        groups = [*self.kept, *self.dropped][: self.cfg.data.prompts_per_step]
        return add_overlong_penalty([r for group in groups for r in group], self.cfg)

    def metrics(self) -> dict[str, float]:
        """rollout/*: seconds are summed over the batches, everything else is averaged."""
        metrics = {
            name: float(
                (np.sum if name.startswith("time/") else np.mean)(
                    [one[name] for one in self.engine_metrics]
                )
            )
            for name in self.engine_metrics[0]
        }
        if self.cfg.algorithm.dynamic_sampling:
            n_groups = len(self.dropped) + len(self.kept)
            metrics["rollout/batches"] = float(len(self.engine_metrics))
            metrics["rollout/flat_fraction"] = len(self.dropped) / n_groups
        return metrics


def collect(run: Run) -> Collected:
    """Samples and rewards the next batch of prompts.

    With algorithm.dynamic_sampling (DAPO, section 3.2, https://arxiv.org/abs/2503.14476) groups of
    equal rewards, or with a mean reward outside dynamic_sampling_range, are dropped. Further batches
    are sampled until the step is full, at most dynamic_sampling_batches in all.
    """
    cfg = run.core.cfg
    n_batches = cfg.algorithm.dynamic_sampling_batches if cfg.algorithm.dynamic_sampling else 1
    collected = Collected(cfg)
    for draw in range(n_batches):
        rollouts, engine_metrics = sample(run, next(run.core.iterator), draw=draw)
        groups = split_groups(reward(run, rollouts), cfg.rollout.n)
        if cfg.data.skip_solved:
            run.core.iterator.mark_solved(solved_prompts(groups, cfg.data.skip_solved))
        collected.add(groups, engine_metrics)
        if collected.full:
            break
    return collected


def greedy_baselines(run: Run, rollouts: list[ScoredRollout]) -> np.ndarray:
    """float64 [len(rollouts)]: reward of the greedy response to the prompt of each rollout (ReMax)."""
    greedy, _ = sample(run, [r.rollout.prompt for r in rollouts], greedy=True)
    rewarded = add_overlong_penalty(reward(run, greedy), run.core.cfg)
    return np.array([r.reward.value for r in rewarded])


def sample(
    run: Run,
    prompts: list[Prompt],
    *,
    validation: bool = False,
    draw: int = 0,
    greedy: bool = False,
) -> tuple[list[Rollout], dict[str, float]]:
    """Samples from the trainer's own parameters; the samples of a prompt are adjacent.

    Args:
      draw: index of the batch of prompts within the step.
      greedy: one response per prompt, at temperature 0.

    Returns: (rollouts, rollout/* metrics).
    """
    cfg = run.core.cfg
    n, sampling = cfg.rollout.n, cfg.rollout.sampling
    if validation:
        n, sampling = cfg.eval.n, cfg.eval.sampling
    elif greedy:
        n, sampling = 1, dataclasses.replace(sampling, temperature=0.0)
    name = "validation" if validation else "rollout"
    with (
        run.core.no_compile(name),
        run.engines.layout.weights(run.core.state.params, run.core.timed("reshard")) as params,
        run.core.timed("val" if validation else "gen"),
    ):
        return run.engines.sample(
            params,
            prompts,
            n=n,
            sampling=sampling,
            seed=run.core.sampling_seed(validation=validation, draw=draw),
            version=run.core.step,
            name=name,
        )


def reward(run: Run, rollouts: list[Rollout], *, validation: bool = False) -> list[ScoredRollout]:
    """The rollouts with their rewards, all of them on every process."""
    with run.core.timed("val" if validation else "reward"), run.core.no_compile("reward"):
        return score(run.rewards, run.reward_model, rollouts, run.core.stop)
