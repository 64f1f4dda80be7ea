"""The loop of all multi-turn rollouts: episodes wait for their environments, or are decoded."""

import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from jaxrl.data.chat.encoding import ChatRenderer
from jaxrl.engine.api import RequestEngine
from jaxrl.rollout.generate import OnProgress, engine_metrics
from jaxrl.types import Prompt, Rollout, Tree


@runtime_checkable
class PlayedEpisode(Protocol):
    """An episode that becomes a rollout once it has ended."""

    @property
    def ended(self) -> bool: ...

    def rollout(self, renderer: ChatRenderer) -> Rollout: ...


@runtime_checkable
class EpisodeRunner[E: PlayedEpisode](Protocol):
    """Unfinished episodes: some wait to start, some for their environment, some for the model."""

    engine: RequestEngine
    renderer: ChatRenderer

    @property
    def in_engine(self) -> Mapping[int, object]:
        """The turns that the model writes, by slot."""
        ...

    @property
    def n_unfinished(self) -> int: ...

    def add(self, prompt: Prompt, sample: int, seed: int) -> E:
        """A new episode, which waits to start."""
        ...

    def start_waiting(self) -> None:
        """Starts waiting episodes while there are free environments."""
        ...

    def poll(self, *, idle: bool) -> None:
        """Handles what environments sent; waits for a moment if the engine is idle."""
        ...

    def decode(self, params: Tree) -> int:
        """Runs one dispatch of the engine. Returns the number of tokens that it sampled."""
        ...

    def pause(self) -> None:
        """Takes unfinished turns of the model out of the engine."""
        ...

    def resume(self, paused_s: float) -> None:
        """Continues the turns, with other weights or not; time limits move by `paused_s`."""
        ...

    def cancel(self) -> None:
        """Cancels all unfinished episodes."""
        ...


def run_episodes(
    runner: EpisodeRunner,
    params: Tree,
    prompts: Sequence[Prompt],
    *,
    n: int,
    seed: int,
    version: int,
    on_progress: OnProgress | None = None,
) -> tuple[list[Rollout], dict[str, float]]:
    """`n` episodes per prompt, ordered by prompt, then sample, and the rollout/* metrics.

    time/env_s is the wall time of waiting for environments with nothing to decode. An exception
    cancels all episodes.
    """
    start, engine = time.perf_counter(), runner.engine
    episodes = [runner.add(prompt, i, seed) for prompt in prompts for i in range(n)]
    engine.take_stats()
    engine.set_version(version)
    n_tokens, waited_s = 0, 0.0
    try:
        while runner.n_unfinished:
            runner.start_waiting()
            before, idle = time.perf_counter(), not runner.in_engine
            runner.poll(idle=idle)
            waited_s += idle * (time.perf_counter() - before)
            if runner.in_engine:
                n_tokens += runner.decode(params)
            if on_progress is not None:
                on_progress(n_tokens, len(episodes) - runner.n_unfinished, len(episodes))
    except BaseException:
        runner.cancel()
        raise
    rollouts = [episode.rollout(runner.renderer) for episode in episodes]
    n_kept = sum(sequence.n_loss_tokens for r in rollouts for sequence in r.sequences)
    metrics = engine_metrics(engine.take_stats(), n_kept, time.perf_counter() - start)
    return rollouts, metrics | {"time/env_s": waited_s}


def episode_task(prompt: Prompt, seed: int) -> dict[str, Any]:
    """What an episode's process gets; its seed is the same for all samples of a prompt."""
    return {
        "messages": list(prompt.messages),
        "answer": prompt.answer,
        "source": prompt.source,
        "extra": prompt.extra,
        "seed": int(np.random.SeedSequence([seed, prompt.id]).generate_state(1)[0]),
    }
