"""Where the scored responses of a step come from, one batch of prompts after the other.

A schedule is a source. Everything else of a step is the same for all of them.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from jaxrl.rollout.generate import engine_metrics
from jaxrl.trainer.phases.sampling import reward, sample, with_model_scores
from jaxrl.trainer.run import Run
from jaxrl.trainer.schedule.generator import GroupGenerator
from jaxrl.types import Rollout, ScoredRollout

Scored = tuple[list[ScoredRollout], dict[str, float]]  # by group, and rollout/* metrics


class SyncSource:
    """Samples a batch of prompts with the current weights, then scores it (mode = "sync")."""

    def next_batch(self, run: Run, draw: int) -> Scored:
        rollouts, metrics = sample(run, next(run.core.iterator), draw=draw)
        return reward(run, rollouts), metrics

    def release_engine(self) -> None:
        pass

    def in_flight(self) -> Callable[[], dict[str, Any]] | None:
        return None


class PartialSource:
    """Groups whose unfinished responses continue under new weights (mode = "partial").

    Generation and training use the same devices in turn. Rewards are computed during both.
    """

    def __init__(self, generator: GroupGenerator):
        self.generator = generator

    def next_batch(self, run: Run, draw: int) -> Scored:
        core, generator, engine = run.core, self.generator, run.engines.engine
        start, check = time.perf_counter(), core.stop.check
        if core.saved_at == core.step:
            self.release_engine()  # a run that resumes from this checkpoint has no KV either
        engine.take_stats()
        with (
            released_on_error(self),
            core.no_compile("rollout"),
            run.engines.layout.weights(core.state.params, core.timed("reshard")) as params,
            core.timed("gen"),
            core.progress.phase("rollout", total=generator.buffer.batch_size) as bar,
        ):

            def on_dispatch() -> None:
                check()
                bar.update(generator.buffer.n_ready)

            generator.begin(core.step, core.step)
            batch = generator.generate(params, core.step, on_dispatch)
        waited_s, stats = time.perf_counter() - start, engine.take_stats()
        with core.timed("reward"):
            generator.wait_for_rewards(batch, check)
        rollouts = [r for group in batch for r in generator.rollouts(group)]
        rewards = [r for group in batch for r in group.rewards or ()]
        n_tokens = sum(len(r.tokens) for r in rollouts)
        metrics = engine_metrics(stats, n_tokens, waited_s) | generator.take_metrics()
        metrics |= staleness_metrics(rollouts, core.step) | {"buffer/waited_s": waited_s}
        return with_model_scores(run.reward_model, rollouts, rewards, core.stop), metrics

    def release_engine(self) -> None:
        """Frees the engine for other requests."""
        self.generator.stream.release()

    def in_flight(self) -> Callable[[], dict[str, Any]]:
        return self.generator.snapshot().json


@contextlib.contextmanager
def released_on_error(source: PartialSource) -> Iterator[None]:
    """Frees the engine if the block raises."""
    try:
        yield
    except BaseException:
        source.release_engine()
        raise


def staleness_metrics(rollouts: Sequence[Rollout], step: int) -> dict[str, float]:
    """Age of the responses at `step`, from the version of the first token, and their versions."""
    ages = [step - int(r.versions[0]) for r in rollouts]
    return {
        "staleness/mean": float(np.mean(ages)),
        "staleness/max": float(max(ages)),
        "rollout/versions_per_response": float(
            np.mean([len(np.unique(r.versions)) for r in rollouts])
        ),
    }
