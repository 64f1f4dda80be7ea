"""Samples the rollouts of a step and computes their rewards; dynamic sampling, ReMax baseline."""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxrl.config.keys import RunConfig
from jaxrl.data.iterator import PromptOutcome
from jaxrl.engine.engine import PagedEngine
from jaxrl.layout import Layout
from jaxrl.learner.reward_model import RewardModel
from jaxrl.rollout.local_judge import LocalJudge
from jaxrl.runtime.signals import StopFlag
from jaxrl.trainer.core import Core, Run
from jaxrl.trainer.phases.rewards import (
    Group,
    add_length_penalties,
    prompt_outcomes,
    split_flat,
    split_groups,
    valid_groups,
    valid_samples,
)
from jaxrl.types import Prompt, Reward, Rollout, ScoredRollout, Tree
from sharding import hosts, to_device, to_host

REFERENCE_VERSION = -1  # of the engine's KV with the initial weights: no version of the policy
Scored = tuple[list[ScoredRollout], dict[str, float]]  # by group, and rollout/* metrics


@dataclasses.dataclass
class Collected:
    """The scored rollouts of a step, from one or more batches of prompts."""

    cfg: RunConfig
    sampled: list[ScoredRollout] = dataclasses.field(default_factory=list)  # all, with penalties
    # Groups without failed samples and overlong penalties; empty if too few samples are left.
    kept: list[Group] = dataclasses.field(default_factory=list)
    dropped: list[Group] = dataclasses.field(default_factory=list)  # by dynamic sampling
    n_failed: int = 0  # groups with too few valid samples
    engine_metrics: list[dict[str, float]] = dataclasses.field(default_factory=list)  # per batch
    # data/*, the state of the curriculum after the last batch
    data_metrics: dict[str, float] = dataclasses.field(default_factory=dict)

    def add(
        self, sampled: list[ScoredRollout], groups: list[Group], engine_metrics: dict[str, float]
    ) -> None:
        """Adds one batch of rollouts and its valid groups.

        Dynamic sampling ignores the length penalties, and replaces groups with too few samples.
        """
        algo = self.cfg.algorithm
        kept, dropped = groups, []
        if algo.dynamic_sampling:
            kept, dropped = split_flat(list(filter(None, groups)), algo.dynamic_sampling_range)
        self.kept += kept
        self.dropped += dropped
        self.n_failed += sum(not group for group in groups)
        for group in split_groups(sampled, self.cfg.rollout.n):
            self.sampled += add_length_penalties(group, self.cfg)
        self.engine_metrics.append(engine_metrics)

    @property
    def n_batches(self) -> int:
        return len(self.engine_metrics)

    @property
    def full(self) -> bool:
        """Whether enough groups are kept for a step, or no more batches are allowed.

        Dynamic sampling (DAPO, section 3.2, https://arxiv.org/abs/2503.14476) drops groups whose
        rewards are all equal or whose mean reward is outside dynamic_sampling_range, and takes at
        most dynamic_sampling_batches in total. Without it, the first batch fills the step.
        """
        algo = self.cfg.algorithm
        most = algo.dynamic_sampling_batches if algo.dynamic_sampling else 1
        return self.n_batches >= most or len(self.kept) >= self.cfg.data.prompts_per_step

    @property
    def n_tokens(self) -> int:
        """Prompt and response tokens of all rollouts."""
        rollouts = [r for scored in self.sampled for r in scored.rollout.sequences]
        return sum(len(r.prompt.tokens) + len(r.tokens) for r in rollouts)

    def chosen(self) -> list[Group]:
        """The groups to train on. If too few groups are kept, dropped groups fill the step."""
        groups = [*self.kept, *self.dropped][: self.cfg.data.prompts_per_step]
        return [add_length_penalties(group, self.cfg) for group in groups]

    def metrics(self) -> dict[str, float]:
        """Metrics of the batches and data/*: sums of times and counts, maxima, or means."""
        metrics = {
            name: float(_reduction(name)([one[name] for one in self.engine_metrics]))
            for name in self.engine_metrics[0]
        }
        metrics |= self.data_metrics
        if self.cfg.algorithm.dynamic_sampling:
            n_groups = max(len(self.dropped) + len(self.kept), 1)
            metrics["rollout/batches"] = float(self.n_batches)
            metrics["rollout/flat_fraction"] = len(self.dropped) / n_groups
        return metrics


SUMMED = ("buffer/dropped", "buffer/waited_s", "rollout/busy_s")


def _reduction(name: str) -> Callable[[Sequence[float]], float]:
    """The function that makes one metric of several batches."""
    if name.startswith("time/") or name in SUMMED:
        return np.sum
    return np.max if name.endswith("/max") else np.mean


def collect(
    run: Run, collected: Collected, sampled: list[ScoredRollout], engine_metrics: dict[str, float]
) -> None:
    """Adds one batch of scored rollouts.

    Samples whose reward or environment failed leave their group (reward.on_error).
    """
    cfg = run.core.cfg
    groups = valid_groups(split_groups(sampled, cfg.rollout.n), cfg)
    if cfg.data.has_curriculum:
        run.source.record(run, prompt_outcomes(groups))
        collected.data_metrics = run.core.iterator.metrics()
    collected.add(sampled, groups, engine_metrics)


def chosen_groups(run: Run, collected: Collected) -> tuple[list[Group], np.ndarray | None]:
    """(groups to train on, baselines); the baselines are None except for ReMax.

    A baseline is the reward of the greedy response to the prompt of each sample, float64 [N]. The
    samples of a prompt share one greedy response. If its reward failed, they have no baseline
    and the group is empty, except with reward.on_error="value".
    """
    cfg, groups = run.core.cfg, collected.chosen()
    if cfg.algorithm.advantage != "remax":
        return groups, None
    prompts = [group[0].rollout.prompt for group in groups if group]
    if not prompts:
        return groups, np.zeros(0)
    greedy, _ = sample(run, prompts, greedy=True)
    scored = reward(run, greedy)
    step = run.core.clock.step + 1
    if failed := [r for r in scored if r.error]:
        run.core.log_samples(step, failed, kind="greedy")
    run.reward_errors.check(scored, f"greedy baseline of step {step}")
    rewarded = iter(add_length_penalties(scored, cfg))
    valid = [valid_samples([next(rewarded)] if group else [], cfg.reward) for group in groups]
    groups = [group if one else [] for group, one in zip(groups, valid, strict=True)]
    collected.n_failed += len(prompts) - len(list(filter(None, groups)))
    pairs = zip(groups, valid, strict=True)
    return groups, np.array([one[0].reward.value for group, one in pairs for _ in group])


def sample(
    run: Run,
    prompts: list[Prompt],
    *,
    validation: bool = False,
    draw: int = 0,
    greedy: bool = False,
) -> tuple[list[Rollout], dict[str, float]]:
    """Samples from the current policy weights. The samples of a prompt are adjacent.

    Args:
      validation: use the sampling settings and the seed of validation.
      draw: index of the batch of prompts within the step.
      greedy: one response per prompt, at temperature 0.

    Returns:
      (rollouts, rollout/* metrics).
    """
    cfg = run.core.cfg
    n, sampling = cfg.rollout.n, cfg.rollout.sampling
    if validation:
        n, sampling = cfg.eval.n, cfg.eval.sampling
    elif greedy:
        n, sampling = 1, dataclasses.replace(sampling, temperature=0.0)
    name = "validation" if validation else "rollout"
    run.source.release_engine()
    if run.engines.images is not None:
        run.engines.images.follow(run.core.state.params)
    with (
        run.core.no_compile(name),
        run.engines.layout.weights(
            run.core.state.params, run.core.clock.timed("reshard")
        ) as params,
        run.core.clock.timed("val" if validation else "gen"),
    ):
        if cfg.rollout.release_kv:
            assert isinstance(run.engines.engine, PagedEngine)
            with run.core.clock.timed("kv"):
                run.engines.engine.allocate()
        engines = run.engines
        if cfg.data.length_stages and not validation:
            longest = run.core.length_stage.max_response_len(cfg.data)
            limits = dataclasses.replace(engines.limits, max_tokens=longest)
            engines = dataclasses.replace(engines, limits=limits)
        return engines.sample(
            params,
            prompts,
            n=n,
            sampling=sampling,
            seed=run.core.sampling_seed(validation=validation, draw=draw),
            version=run.core.clock.step,
            name=name,
        )


@contextlib.contextmanager
def policy_on_host(core: Core, engine: PagedEngine) -> Iterator[None]:
    """Has training's weights of the policy in host memory (learner.offload=policy).

    The KV pages, which may take their place, are freed before the weights return.
    """
    with core.clock.timed("reshard"):
        params = jax.block_until_ready(to_host(core.state.params))
        core.state = dataclasses.replace(core.state, params=params)
    try:
        yield
    finally:
        engine.release()
        with core.clock.timed("reshard"):
            params = jax.block_until_ready(to_device(params))
            core.state = dataclasses.replace(core.state, params=params)


def end_rollouts(run: Run) -> None:
    """Frees the KV pages until the next rollout, if the run does so (rollout.release_kv)."""
    if run.core.cfg.rollout.release_kv:
        assert isinstance(run.engines.engine, PagedEngine)
        run.source.release_engine()  # its unfinished responses lose their KV
        with run.core.clock.timed("kv"):
            run.engines.engine.release()


def reward(run: Run, rollouts: list[Rollout], *, validation: bool = False) -> list[ScoredRollout]:
    """All rollouts with their rewards, on every process."""
    with run.core.clock.timed("val" if validation else "reward"), run.core.no_compile("reward"):
        run_functions = functools.partial(judged, run) if run.judge else run.rewards.score
        return score(run_functions, run.reward_model, rollouts, run.core.session.stop)


def judged(run: Run, rollouts: Sequence[Rollout]) -> list[Reward]:
    """The rewards of the functions, while a judge on the run's devices answers their requests."""
    judge = run.judge
    assert judge is not None
    ticket, found = run.rewards.submit(rollouts), dict[int, list[Reward]]()

    def done() -> bool:
        found.update(run.rewards.collect(wait=False))
        return ticket in found

    with judge_weights(run, judge) as (params, version):
        judge.serve(params, version, done)
    return found[ticket]


@contextlib.contextmanager
def judge_weights(run: Run, judge: LocalJudge) -> Iterator[tuple[Tree, int]]:
    """(weights of a judge on the mesh of its engine, their version)."""
    core, layout = run.core, run.engines.layout
    if judge.model is not None:
        with judge.model.weights() as params:
            yield params, 0
        return
    assert isinstance(layout, Layout), "schedule.rollout_workers=0"
    is_policy = core.cfg.reward.judge.weights == "policy"
    with layout.weights(core.judge_params, core.clock.timed("reshard")) as params:
        yield params, core.clock.step if is_policy else REFERENCE_VERSION


def score(
    run_functions: Callable[[Sequence[Rollout]], list[Reward]],
    reward_model: RewardModel | None,
    rollouts: Sequence[Rollout],
    stop: StopFlag,
) -> list[ScoredRollout]:
    """All rollouts with their rewards, on every process.

    Each process runs the reward functions for its share of the prompts. The reward model runs on
    all processes together.
    """
    groups = [list(group) for _, group in itertools.groupby(rollouts, lambda r: r.prompt.id)]
    with hosts.raise_together():
        own = groups[hosts.local_slice(len(groups))]
        share = run_functions(list(itertools.chain.from_iterable(own)))
    stop.check()
    return with_model_scores(reward_model, rollouts, hosts.gather_items(share), stop)


def with_model_scores(
    reward_model: RewardModel | None,
    rollouts: Sequence[Rollout],
    rewards: Sequence[Reward],
    stop: StopFlag,
) -> list[ScoredRollout]:
    """The rollouts with the rewards of the functions, and with the scores of the reward model."""
    if reward_model is not None:
        rewards = reward_model.add_scores(rollouts, rewards, stop.check)
    return [ScoredRollout(*pair) for pair in zip(rollouts, rewards, strict=True)]


class SyncSource:
    """The schedule without staleness (mode = "sync"): nothing is in flight after a step."""

    def rollout(self, run: Run, draw: int) -> tuple[list[Rollout], dict[str, float]]:
        return sample(run, next(run.core.iterator), draw=draw)

    def reward(self, run: Run, rollouts: tuple[list[Rollout], dict[str, float]]) -> Scored:
        return reward(run, rollouts[0]), rollouts[1]

    def record(self, run: Run, outcomes: Sequence[PromptOutcome]) -> None:
        run.core.iterator.record(outcomes)

    def release_engine(self) -> None:
        pass

    def in_flight(self) -> Callable[[], dict[str, Any]] | None:
        return None
