"""Rollouts of agents: programs that talk to the engine of the run over HTTP while it decodes.

An agent occupies a slot of the engine only while the model writes one of its turns.
"""

import collections
import contextlib
import dataclasses
import queue
import time
from concurrent.futures import ThreadPoolExecutor

from jaxrl.config.keys import SamplingConfig
from jaxrl.engine.api import Request, RequestEngine
from jaxrl.environments.pool import EnvironmentPool, episode_task
from jaxrl.http.errors import RequestError
from jaxrl.rollout.agents.chat import Reply
from jaxrl.rollout.agents.endpoint import (
    AgentCall,
    AgentEndpoint,
    RenderedTurn,
    RewardCall,
    TurnCall,
)
from jaxrl.rollout.agents.episode import AgentEpisode, AgentLimits, PendingTurn
from jaxrl.rollout.agents.turn import TurnReader
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
    call: TurnCall
    turn: PendingTurn


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
    ):
        self.agents, self.reader, self.sampling, self.limits = agents, reader, sampling, limits
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
        for turn in self.turns.cancel(lambda called: called.call.future.cancelled()):
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
        elif not call.future.cancelled():  # else its client has disconnected
            if number is None:
                self._fail(call, RequestError(404, "this episode has ended", code="episode_ended"))
            elif isinstance(call, RewardCall):
                self.started[number].add_numbers(call.numbers)
                if call.future.set_running_or_notify_cancel():
                    call.future.set_result(None)
            else:
                self._submit(number, call)

    def _submit(self, number: int, call: TurnCall) -> None:
        """Renders the messages of a turn on a thread, or answers with the reason why not."""
        episode, calls = self.started[number], self.agents.endpoint.calls
        try:
            placed = self.reader.place(episode, call.request)
        except RequestError as error:
            episode.reject()
            return self._fail(call, error)
        self._rendering[call] = number
        tokens = self._threads.submit(self.reader.render, placed)
        return tokens.add_done_callback(
            lambda done: calls.put(RenderedTurn(number, call, placed, done))
        )

    def _begin(self, rendered: RenderedTurn) -> None:
        """Queues a turn of the model, or answers with the reason why it cannot."""
        call, number = rendered.call, rendered.number
        if self._rendering.pop(call, None) is None:  # its episode has ended
            return None
        episode = self.started[number]
        if call.future.cancelled():
            return episode.withdraw(rendered.placed)
        try:
            turn = episode.begin_turn(rendered.placed, rendered.tokens.result())
        except RequestError as error:
            episode.withdraw(rendered.placed)
            episode.reject()
            return self._fail(call, error)
        request = Request(
            tokens=turn.tokens,
            max_tokens=turn.max_tokens,
            sampling=self.sampling,
            prompt_id=episode.prompt.id,
            sample=episode.sample,
            seed=turn.seed,
        )
        called = CalledTurn(number, call, turn)
        response = Response(episode.prompt, episode.sample)
        stop = (*self.sampling.stop, *turn.request.stop)
        self.turns.submit(ActiveTurn(called, request, response, stop))
        return self.agents.pool.pause(number)

    def after_turn(self, turn: ActiveTurn[CalledTurn]) -> None:
        """Keeps a finished turn and answers the request, unless its client has disconnected."""
        called, response = turn.owner, turn.response
        episode, future = self.started[called.number], called.call.future
        if not future.set_running_or_notify_cancel():
            episode.cancel_turn(called.turn)
            return self._resume(called.number)
        message, finish, n_malformed = self.reader.message(called.turn, response, turn.stop)
        episode.end_turn(called.turn, response, message, n_malformed)
        self._resume(called.number)
        reply = Reply(message, finish, len(called.turn.tokens), len(response.tokens))
        return future.set_result(reply)

    def _resume(self, number: int) -> None:
        """Starts the time limit of the agent again, unless it waits for another turn."""
        if all(turn.owner.number != number for turn in self.turns.all):
            self.agents.pool.resume(number)

    def _fail(self, call: TurnCall | RewardCall, error: RequestError) -> None:
        if call.future.set_running_or_notify_cancel():
            call.future.set_exception(error)

    def _end(self, number: int, error: str) -> None:
        """Ends an episode; the turns that the model is writing for it are cancelled."""
        turns = self.turns.cancel(lambda called: called.number == number)
        rendering = [call for call, owner in self._rendering.items() if owner == number]
        for call in [turn.owner.call for turn in turns] + rendering:
            self._rendering.pop(call, None)
            self._fail(call, RequestError(503, "this episode has ended"))
        name = self._ids.pop(number)
        del self._numbers[name]
        self._deadlines.pop(number, None)
        self.agents.endpoint.end(name)
        self.agents.pool.end(number)
        self.started.pop(number).end(error)
