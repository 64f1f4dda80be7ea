"""The one loop around the engine, for responses of a single turn, environments and agents.

Groups of episodes start, wait for their environments or are decoded, pause while weights change,
and continue under the new ones. A synchronous rollout runs the loop until all groups are complete.
A schedule with staleness runs it dispatch by dispatch, and takes the groups that are complete.
`SingleTurnRunner` is the simplest runner; multi_turn.py and agents/runner.py have the others.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

from jaxrl.config.keys import SamplingConfig
from jaxrl.engine.api import EngineStats, Request, RequestEngine
from jaxrl.rollout.request_images import EpisodeImages, features_of
from jaxrl.rollout.schedule.buffer import PromptGroup
from jaxrl.rollout.turns import ActiveTurn, ActiveTurns, Response
from jaxrl.types import Decode, Prompt, Rollout, Tree

# (tokens generated, episodes ended, episodes in total)
OnProgress = Callable[[int, int, int], None]


@runtime_checkable
class PlayedEpisode(Protocol):
    """An episode, or a response of a single turn, that becomes a rollout once it has ended."""

    @property
    def ended(self) -> bool: ...

    def freeze(self, decode: Decode) -> Rollout: ...


@runtime_checkable
class EpisodeRunner[E: PlayedEpisode](Protocol):
    """Unfinished episodes: some wait to start, some for their environment, some for the model."""

    turns: ActiveTurns[Any]  # that the model writes

    @property
    def n_unfinished(self) -> int: ...

    def add(self, group: PromptGroup, sample: int) -> E:
        """An episode of the group, which starts now or in a later `poll`."""
        ...

    def after_turn(self, turn: ActiveTurn[Any]) -> None:
        """Handles a turn that the model has ended."""
        ...

    def cancel(self, episode: E) -> None:
        """Ends an unfinished episode."""
        ...


@runtime_checkable
class WaitingRunner(Protocol):
    """An EpisodeRunner whose episodes wait for environments or agents."""

    def start_waiting(self) -> None:
        """Starts waiting episodes while there are free environments."""
        ...

    def poll(self, *, idle: bool) -> None:
        """Handles what environments sent; waits for a moment if the engine is idle."""
        ...

    def postpone(self, seconds: float) -> None:
        """Moves time limits by a time without `poll`."""
        ...


class RolloutLoop[E: PlayedEpisode]:
    """The unfinished episodes of groups, in the engine, in environments or waiting for them.

    An episode continues under new weights with the tokens that it has. Their KV is computed again,
    or kept with `keep_kv`.
    """

    def __init__(self, runner: EpisodeRunner[E], *, n: int, keep_kv: bool = False):
        """`n` is the number of episodes of a group."""
        self.runner, self.turns, self.n, self.keep_kv = runner, runner.turns, n, keep_kv
        self._waiting = runner if isinstance(runner, WaitingRunner) else None
        self._episodes: dict[PromptGroup, list[E]] = {}  # of unfinished groups
        self._version: int | None = None
        self._dispatched_at = time.monotonic()
        self._waited_s = 0.0

    @property
    def engine(self) -> RequestEngine:
        return self.turns.engine

    @property
    def n_unfinished(self) -> int:
        """Episodes that have not ended."""
        return self.runner.n_unfinished

    def resume(self, version: int, groups: Iterable[PromptGroup]) -> None:
        """Continues these groups under the weights of `version`, and starts the new ones.

        Groups that are no longer listed are cancelled. The time limits of environments leave out
        the time since the last dispatch.
        """
        if version != self._version and not self.keep_kv:
            self.release()
        self._version = version
        self.engine.set_version(version)
        unfinished = [group for group in groups if group.rollouts is None]
        self._cancel([group for group in self._episodes if group not in unfinished])
        if self._waiting is not None:
            self._waiting.postpone(time.monotonic() - self._dispatched_at)
        self.turns.resume()
        for group in unfinished:
            if group not in self._episodes:
                episodes = self._episodes[group] = []
                for sample in range(self.n):
                    episodes.append(self.runner.add(group, sample))
        self._completed()

    def dispatch(self, params: Tree) -> list[PromptGroup]:
        """Starts episodes, takes what environments sent, and runs one dispatch of the engine.

        Returns the groups whose episodes have all ended; they then have their rollouts.
        """
        if self._waiting is not None:
            self._poll(self._waiting)
        if self.turns.in_engine:
            for turn in self.turns.dispatch(params):
                self.runner.after_turn(turn)
        self._dispatched_at = time.monotonic()
        return self._completed()

    def release(self) -> None:
        """Frees all slots of the engine; `resume` computes the KV again."""
        self.turns.pause()

    def cancel(self) -> None:
        """Cancels all unfinished episodes."""
        self._cancel(list(self._episodes))

    def take_metrics(self) -> dict[str, float]:
        """time/env_s: seconds with nothing to decode, waiting for environments, if there are."""
        waited_s, self._waited_s = self._waited_s, 0.0
        return {} if self._waiting is None else {"time/env_s": waited_s}

    def _poll(self, waiting: WaitingRunner) -> None:
        waiting.start_waiting()
        start, idle = time.monotonic(), not self.turns.in_engine
        waiting.poll(idle=idle)
        self._waited_s += idle * (time.monotonic() - start)

    def _cancel(self, groups: Sequence[PromptGroup]) -> None:
        for group in groups:
            for episode in self._episodes.pop(group):
                if not episode.ended:
                    self.runner.cancel(episode)

    def _completed(self) -> list[PromptGroup]:
        """The groups whose episodes have all ended, with their rollouts."""
        completed = [g for g, own in self._episodes.items() if all(one.ended for one in own)]
        for group in completed:
            episodes = self._episodes.pop(group)
            group.rollouts = [one.freeze(self.turns.decode) for one in episodes]
        return completed


def generate(
    runner: EpisodeRunner,
    params: Tree,
    prompts: Sequence[Prompt],
    *,
    n: int,
    seed: int,
    version: int,
    on_progress: OnProgress | None = None,
) -> tuple[list[Rollout], dict[str, float]]:
    """`n` rollouts per prompt, ordered by prompt, then sample, and the rollout/* metrics.

    `on_progress` is called after each dispatch. An exception cancels all episodes. Raises
    ValueError if a request can never fit the engine.
    """
    start, loop = time.perf_counter(), RolloutLoop(runner, n=n)
    groups = [PromptGroup(prompt, seed, draw=0, index=i) for i, prompt in enumerate(prompts)]
    loop.engine.take_stats()
    try:
        loop.resume(version, groups)
        while loop.n_unfinished:
            loop.dispatch(params)
            if on_progress is not None:
                n_all = n * len(groups)
                on_progress(loop.turns.n_tokens, n_all - loop.n_unfinished, n_all)
    except BaseException:
        loop.cancel()
        raise
    rollouts = [rollout for group in groups for rollout in group.rollouts or ()]
    n_kept = sum(sequence.n_loss_tokens for r in rollouts for sequence in r.sequences)
    metrics = engine_metrics(loop.engine.take_stats(), n_kept, time.perf_counter() - start)
    return rollouts, metrics | loop.take_metrics()


def engine_metrics(stats: EngineStats, n_tokens: int, wall_s: float) -> dict[str, float]:
    """The rollout/* metrics of one call, averaged over its decode steps.

    `n_tokens` counts the tokens of finished responses, `wall_s` is the wall time of the call.
    """
    steps = max(stats.n_steps, 1)
    n_prompt_tokens = stats.n_prefill_tokens + stats.n_cached_tokens
    return {
        "rollout/tokens_per_s": n_tokens / max(wall_s, 1e-9),
        "rollout/cache_utilization": stats.cache_used / steps,
        "rollout/cache_utilization_max": stats.cache_used_max,
        "rollout/running": stats.running / steps,
        "rollout/waiting": stats.waiting / steps,
        "rollout/preempted": float(stats.n_preempted),
        "rollout/prefill_tokens": float(stats.n_prefill_tokens),
        "rollout/shared_tokens": float(stats.n_cached_tokens),
        "rollout/prefix_hit_rate": stats.n_cached_tokens / max(n_prompt_tokens, 1),
        "rollout/padding_fraction": 1.0
        - (stats.n_tokens - stats.n_accepted_tokens) / max(stats.n_batch_slots, 1),
        "rollout/draft_acceptance": stats.n_accepted_tokens / max(stats.n_draft_tokens, 1),
        "rollout/host_fraction": stats.host_s / max(stats.host_s + stats.device_s, 1e-9),
    }


# (group, index of the sample) -> the request for all tokens of its response
MakeRequest = Callable[[PromptGroup, int], Request]


class SingleTurnRunner:
    """Implements EpisodeRunner: an episode is one response. Those of a group can be saved."""

    def __init__(self, engine: RequestEngine, make_request: MakeRequest, decode: Decode):
        self.make_request = make_request
        self.turns: ActiveTurns[Response] = ActiveTurns(engine, decode)

    @property
    def n_unfinished(self) -> int:
        return len(self.turns.all)

    def add(self, group: PromptGroup, sample: int) -> Response:
        """A new response of the group, or the one that it has from a checkpoint."""
        if sample == len(group.responses):
            group.responses.append(Response(group.prompt, sample))
        response = group.responses[sample]
        if not response.ended:
            request = self.make_request(group, sample)
            self.turns.submit(ActiveTurn(response, request, response, request.sampling.stop))
        return response

    def after_turn(self, turn: ActiveTurn[Response]) -> None:
        """Nothing: the response has ended."""

    def cancel(self, episode: Response) -> None:
        self.turns.cancel(lambda owner: owner is episode)


def sampled_requests(
    sampling: SamplingConfig, max_tokens: int, images: EpisodeImages | None = None
) -> MakeRequest:
    """Requests that differ in their prompts and random numbers only.

    `images` computes the features of images, if prompts have any.
    """

    def make_request(group: PromptGroup, sample: int) -> Request:
        return Request(
            tokens=group.prompt.tokens,
            max_tokens=max_tokens,
            sampling=sampling,
            prompt_id=group.prompt.id,
            sample=sample,
            seed=group.seed,
            images=features_of(images, group.prompt.images),
        )

    return make_request
