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
from jaxrl.environments.pool import EnvironmentPool
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
from jaxrl.rollout.episodes import episode_task
from jaxrl.rollout.generate import Response, append_generated, continued
from jaxrl.types import Prompt, Tree

N_RENDER_THREADS = 2
IDLE_S = 0.02  # wait for requests when idle, between two looks at the agents' processes


@dataclasses.dataclass(frozen=True)
class Agents:
    """The processes of agents, and the endpoint that they call."""

    pool: EnvironmentPool
    endpoint: AgentEndpoint


@dataclasses.dataclass(eq=False)
class ActiveTurn:
    """A turn in the engine, or waiting for it."""

    number: int  # the episode's, in the pool
    call: TurnCall
    turn: PendingTurn
    response: Response


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
        self.engine, self.agents, self.reader = engine, agents, reader
        self.renderer = reader.renderer
        self.sampling, self.limits = sampling, limits
        self.waiting: collections.deque[AgentEpisode] = collections.deque()
        self.started: dict[int, AgentEpisode] = {}  # by number in the pool
        self.in_engine: dict[int, ActiveTurn] = {}  # by slot
        self._paused: list[ActiveTurn] = []
        self._threads = ThreadPoolExecutor(N_RENDER_THREADS, "render")
        self._rendering: dict[TurnCall, int] = {}  # number of the episode
        self._numbers: dict[str, int] = {}  # by id of the endpoint
        self._ids: dict[int, str] = {}
        self._deadlines: dict[int, float] = {}

    @property
    def n_unfinished(self) -> int:
        return len(self.waiting) + len(self.started)

    def add(self, prompt: Prompt, sample: int, seed: int) -> AgentEpisode:
        """A new episode, which waits to start."""
        self.waiting.append(AgentEpisode(prompt, sample, seed=seed, limits=self.limits))
        return self.waiting[-1]

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

    def decode(self, params: Tree) -> int:
        """Runs one dispatch of the engine. Returns the number of tokens that it sampled."""
        n_tokens = 0
        for generated in self.engine.generate(params):
            active = self.in_engine[generated.slot]
            n_tokens += len(generated.tokens)
            stop = (*self.sampling.stop, *active.turn.request.stop)
            append_generated(active.response, generated, stop, self.renderer.decode)
            if active.response.finish:
                del self.in_engine[generated.slot]
                if not generated.finish:
                    self.engine.free(generated.slot)
                self._after_turn(active, stop)
        return n_tokens

    def pause(self) -> None:
        """Takes unfinished turns of the model out of the engine."""
        self._paused += [self._drop(slot) for slot in list(self.in_engine)]

    def resume(self, paused_s: float) -> None:
        """Continues the turns, with other weights or not; time limits move by `paused_s`."""
        self.agents.pool.postpone(paused_s)
        self._deadlines = {number: end + paused_s for number, end in self._deadlines.items()}
        paused, self._paused = self._paused, []
        for active in paused:
            self._queue(active)

    def cancel(self) -> None:
        """Cancels all unfinished episodes."""
        for number in list(self.started):
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
        for slot, active in list(self.in_engine.items()):
            if active.call.future.cancelled():
                self._drop(slot)
                self.started[active.number].cancel_turn(active.turn)
                self._resume(active.number)

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
        self._queue(ActiveTurn(number, call, turn, Response(episode.prompt, episode.sample)))
        return self.agents.pool.pause(number)

    def _queue(self, active: ActiveTurn) -> None:
        """Queues the rest of a turn."""
        turn, response = active.turn, active.response
        request = Request(
            tokens=turn.tokens,
            max_tokens=turn.max_tokens,
            sampling=self.sampling,
            prompt_id=response.prompt.id,
            sample=response.sample,
            seed=turn.seed,
        )
        self.in_engine[self.engine.submit(continued(request, response.tokens))] = active

    def _after_turn(self, active: ActiveTurn, stop: tuple[str, ...]) -> None:
        """Keeps a finished turn and answers the request, unless its client has disconnected."""
        episode, response = self.started[active.number], active.response
        if not active.call.future.set_running_or_notify_cancel():
            episode.cancel_turn(active.turn)
            return self._resume(active.number)
        message, finish, n_malformed = self.reader.message(active.turn, response, stop)
        episode.end_turn(active.turn, response, message, n_malformed)
        self._resume(active.number)
        reply = Reply(message, finish, len(active.turn.tokens), len(response.tokens))
        return active.call.future.set_result(reply)

    def _resume(self, number: int) -> None:
        """Starts the time limit of the agent again, unless it waits for another turn."""
        waiting = (*self.in_engine.values(), *self._paused)
        if all(active.number != number for active in waiting):
            self.agents.pool.resume(number)

    def _drop(self, slot: int) -> ActiveTurn:
        with contextlib.suppress(KeyError):  # the engine no longer has it
            self.engine.free(slot)
        return self.in_engine.pop(slot)

    def _fail(self, call: TurnCall | RewardCall, error: RequestError) -> None:
        if call.future.set_running_or_notify_cancel():
            call.future.set_exception(error)

    def _end(self, number: int, error: str) -> None:
        """Ends an episode; the turns that the model is writing for it are cancelled."""
        slots = [slot for slot, active in self.in_engine.items() if active.number == number]
        paused = [active for active in self._paused if active.number == number]
        self._paused = [active for active in self._paused if active.number != number]
        rendering = [call for call, owner in self._rendering.items() if owner == number]
        for call in [active.call for active in (*paused, *map(self._drop, slots))] + rendering:
            self._rendering.pop(call, None)
            self._fail(call, RequestError(503, "this episode has ended"))
        name = self._ids.pop(number)
        del self._numbers[name]
        self._deadlines.pop(number, None)
        self.agents.endpoint.end(name)
        self.agents.pool.end(number)
        self.started.pop(number).end(error)
