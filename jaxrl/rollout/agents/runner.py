"""Rollouts of agents: programs that talk to the engine of the run over HTTP while it decodes.

An agent occupies a slot of the engine only while the model writes one of its turns.
"""

import collections
import contextlib
import dataclasses
import queue
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from jaxrl.config.keys import SamplingConfig
from jaxrl.data.images.placed import PlacedTokens
from jaxrl.engine.api import Request, RequestEngine
from jaxrl.environments.pool import EnvironmentPool, episode_task
from jaxrl.http.errors import RequestError
from jaxrl.rollout.agents.chat import Reply
from jaxrl.rollout.agents.endpoint import (
    AgentCall,
    AgentEndpoint,
    CountCall,
    RenderedTurn,
    RewardCall,
    TurnCall,
)
from jaxrl.rollout.agents.episode import AgentEpisode, AgentLimits, PendingTurn, PlacedTurn
from jaxrl.rollout.agents.turn import TurnReader
from jaxrl.rollout.request_images import EpisodeImages, features_of
from jaxrl.rollout.schedule.buffer import PromptGroup
from jaxrl.rollout.turns import ActiveTurn, ActiveTurns, Response

N_RENDER_THREADS = 2
IDLE_S = 0.02  # wait for requests when idle, between two looks at the agents' processes


@dataclasses.dataclass(frozen=True)
class Agents:
    """The processes of agents, and the endpoint that they call."""

    pool: EnvironmentPool
    endpoint: AgentEndpoint


@dataclasses.dataclass(frozen=True, eq=False)
class CalledTurn:
    """A turn that the model writes for a request of an agent."""

    number: int  # the episode's, in the pool
    future: Future[Reply]
    turn: PendingTurn
    began_at: float = dataclasses.field(default_factory=time.monotonic)


class AgentRunner:
    """The unfinished episodes of agents, and their turns in the engine.

    A rollout has the tokens of the conversation with the latest turn, and further conversations as
    `branches`.
    """

    def __init__(
        self,
        engine: RequestEngine,
        agents: Agents,
        reader: TurnReader,
        *,
        sampling: SamplingConfig,
        limits: AgentLimits,
        images: EpisodeImages | None = None,
    ):
        """`images` is None in a run without images."""
        self.agents, self.reader, self.sampling, self.limits = agents, reader, sampling, limits
        self.images = images
        self.turns: ActiveTurns[CalledTurn] = ActiveTurns(engine, reader.renderer.decode)
        self.waiting: collections.deque[AgentEpisode] = collections.deque()
        self.started: dict[int, AgentEpisode] = {}  # by number in the pool
        self._threads = ThreadPoolExecutor(N_RENDER_THREADS, "render")
        self._rendering: dict[TurnCall, int] = {}  # number of the episode
        self._numbers: dict[str, int] = {}  # by id of the endpoint
        self._ids: dict[int, str] = {}
        self._deadlines: dict[int, float] = {}

    @property
    def n_unfinished(self) -> int:
        return len(self.waiting) + len(self.started)

    def add(self, group: PromptGroup, sample: int) -> AgentEpisode:
        """A new episode, which waits to start."""
        episode = AgentEpisode(group.prompt, sample, seed=group.seed, limits=self.limits)
        self.waiting.append(episode)
        return episode

    def start_waiting(self) -> None:
        """Starts waiting episodes while the pool has free processes."""
        endpoint, pool = self.agents.endpoint, self.agents.pool
        while self.waiting and pool.n_free:
            episode = self.waiting.popleft()
            episode.begin()
            name = endpoint.open()
            address = {"base_url": endpoint.base_url(name), "api_key": name}
            number = pool.start(episode_task(episode.prompt, episode.seed) | address)
            self._numbers[name], self._ids[number] = number, name
            self.started[number] = episode
            if self.limits.timeout_s:
                self._deadlines[number] = time.monotonic() + self.limits.timeout_s

    def poll(self, *, idle: bool) -> None:
        """Handles the calls of agents and the ends of their processes."""
        self._take_calls(IDLE_S if idle else 0.0)
        self._poll_agents()
        self._drop_cancelled()

    def postpone(self, seconds: float) -> None:
        self.agents.pool.postpone(seconds)
        self._deadlines = {number: end + seconds for number, end in self._deadlines.items()}

    def cancel(self, episode: AgentEpisode) -> None:
        if episode in self.waiting:
            self.waiting.remove(episode)
        else:
            [number] = [number for number, one in self.started.items() if one is episode]
            self._end(number, "the run was interrupted")

    def _take_calls(self, timeout_s: float) -> None:
        """Handles the calls of agents, waiting up to `timeout_s` for the first."""
        calls = self.agents.endpoint.calls
        with contextlib.suppress(queue.Empty):
            self._handle(calls.get(timeout=timeout_s) if timeout_s else calls.get_nowait())
            while True:
                self._handle(calls.get_nowait())

    def _poll_agents(self) -> None:
        """Ends the episodes whose agent has returned, failed or used up its time."""
        for number, result in self.agents.pool.collect(0.0):
            episode = self.started[number]
            numbers = {"reward": result.reward} if result.rewarded and not result.error else {}
            episode.add_numbers(result.counts | numbers)
            self._end(number, result.error)
        now = time.monotonic()
        for number in [n for n, end in self._deadlines.items() if end < now]:
            limit = f"{self.limits.timeout_s:g} s (env.episode_timeout_s)"
            self._end(number, f"the agent did not end within {limit}")

    def _drop_cancelled(self) -> None:
        """Frees the slots of turns whose client has disconnected."""
        for turn in self.turns.cancel(lambda called: called.future.cancelled()):
            self.started[turn.owner.number].cancel_turn(turn.owner.turn)
            self._resume(turn.owner.number)

    def _handle(self, call: AgentCall) -> None:
        if isinstance(call, RenderedTurn):
            self._begin(call)
            return
        number = self._numbers.get(call if isinstance(call, str) else call.episode)
        if isinstance(call, str):  # a request that was answered with an error
            if number is not None:
                self.started[number].reject()
        elif _cancelled(call.futures):  # the client has disconnected
            return
        elif number is None:
            error = RequestError(404, "this episode has ended", code="episode_ended")
            _fail(call.futures, error)
        elif isinstance(call, RewardCall):
            self.started[number].add_numbers(call.numbers)
            _finish(call.futures, None)
        elif isinstance(call, CountCall):
            self._count(self.started[number], call)
        else:
            self._submit(number, call)

    def _count(self, episode: AgentEpisode, call: CountCall) -> None:
        """Counts the tokens of a conversation on a thread, or answers with the reason why not."""
        try:
            placed = self.reader.find(episode, call.request)
        except RequestError as error:
            episode.reject()
            return _fail(call.futures, error)

        def answer(tokens: Future[PlacedTokens]) -> None:
            if (error := tokens.exception()) is not None:
                _fail(call.futures, error)
            else:
                _finish(call.futures, len(placed.kept) + len(tokens.result()))

        return self._threads.submit(self.reader.render, placed).add_done_callback(answer)

    def _submit(self, number: int, call: TurnCall) -> None:
        """Renders the messages of a turn on a thread, or answers with the reason why not.

        The choices of a call see the same tokens: all but the first begin a branch.
        """
        episode, calls = self.started[number], self.agents.endpoint.calls
        placed: list[PlacedTurn] = []
        try:
            for _ in call.futures:
                placed.append(self.reader.place(episode, call.request))
        except RequestError as error:
            return self._reject(episode, call, placed, error)
        self._rendering[call] = number
        tokens = self._threads.submit(self.reader.render, placed[0])
        return tokens.add_done_callback(
            lambda done: calls.put(RenderedTurn(number, call, tuple(placed), done))
        )

    def _reject(
        self,
        episode: AgentEpisode,
        call: TurnCall,
        placed: Iterable[PlacedTurn],
        error: RequestError,
    ) -> None:
        """Answers a call of which no turn can begin."""
        for one in placed:
            episode.withdraw(one)
        episode.reject()
        _fail(call.futures, error)

    def _begin(self, rendered: RenderedTurn) -> None:
        """Queues turns of the model, or answers with the reason why they cannot begin."""
        call, number = rendered.call, rendered.number
        if self._rendering.pop(call, None) is None:  # its episode has ended
            return
        episode = self.started[number]
        if _cancelled(call.futures):
            for placed in rendered.placed:
                episode.withdraw(placed)
            return
        try:
            tokens = rendered.tokens.result()
            turns = [episode.begin_turn(placed, tokens) for placed in rendered.placed]
        except RequestError as error:
            self._reject(episode, call, rendered.placed, error)
            return
        for turn, future in zip(turns, call.futures, strict=True):
            self._sample(CalledTurn(number, future, turn))
        self.agents.pool.pause(number)

    def _sample(self, called: CalledTurn) -> None:
        """Queues a turn in the engine."""
        episode, turn = self.started[called.number], called.turn
        request = Request(
            tokens=turn.input.tokens,
            max_tokens=turn.max_tokens,
            sampling=self.sampling,
            prompt_id=episode.prompt.id,
            sample=episode.sample,
            seed=turn.seed,
            images=features_of(self.images, turn.input.images),
        )
        response = Response(episode.prompt, episode.sample)
        stop = (*self.sampling.stop, *turn.request.stop)
        self.turns.submit(ActiveTurn(called, request, response, stop))

    def after_turn(self, turn: ActiveTurn[CalledTurn]) -> None:
        """Keeps a finished turn and answers the request, unless its client has disconnected."""
        called, response = turn.owner, turn.response
        episode, future = self.started[called.number], called.future
        if not future.set_running_or_notify_cancel():
            episode.cancel_turn(called.turn)
            return self._resume(called.number)
        episode.add_span("engine", called.began_at)
        reply, n_malformed = self.reader.reply(called.turn, response, turn.stop)
        episode.end_turn(called.turn, response, reply.message, n_malformed)
        self._resume(called.number)
        return future.set_result(reply)

    def _resume(self, number: int) -> None:
        """Starts the time limit of the agent again, unless it waits for another turn."""
        if all(turn.owner.number != number for turn in self.turns.all):
            self.agents.pool.resume(number)

    def _end(self, number: int, error: str) -> None:
        """Ends an episode; the turns that the model is writing for it are cancelled."""
        turns = self.turns.cancel(lambda called: called.number == number)
        rendering = [call for call, owner in self._rendering.items() if owner == number]
        for call in rendering:
            del self._rendering[call]
        futures = [turn.owner.future for turn in turns]
        futures += [future for call in rendering for future in call.futures]
        _fail(futures, RequestError(503, "this episode has ended"))
        name = self._ids.pop(number)
        del self._numbers[name]
        self._deadlines.pop(number, None)
        self.agents.endpoint.end(name)
        self.agents.pool.end(number)
        self.started.pop(number).end(error)


def _cancelled(futures: Iterable[Future[Any]]) -> bool:
    """Whether the client that waits for them has disconnected."""
    return all(future.cancelled() for future in futures)


def _finish(futures: Iterable[Future[Any]], result: Any) -> None:
    for future in futures:
        if future.set_running_or_notify_cancel():
            future.set_result(result)


def _fail(futures: Iterable[Future[Any]], error: BaseException) -> None:
    for future in futures:
        if future.set_running_or_notify_cancel():
            future.set_exception(error)
