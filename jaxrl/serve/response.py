"""A request under way: its choices grow with what the engine's thread delivers."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future

import numpy as np

from jaxrl.data.chat import ChatRenderer
from jaxrl.engine.api import Generated, Request
from jaxrl.serve.choice import Choice, Delta
from jaxrl.serve.engine_thread import EngineThread, Job
from jaxrl.serve.errors import Refused
from jaxrl.serve.metrics import Meters
from jaxrl.serve.request import Asked
from jaxrl.serve.score import Scores, score
from sharding.rules import DECODE


class Answer:
    """Made on the event loop; the engine has the request from then on, until all choices have ended
    or `close`. Raises Refused where the engine takes no more."""

    def __init__(
        self,
        asked: Asked,
        renderer: ChatRenderer,
        engine: EngineThread,
        meters: Meters,
        *,
        timeout_s: float,
    ):
        self.asked = asked
        self._engine, self._meters = engine, meters
        self._start = time.monotonic()
        self._deadline = asyncio.get_running_loop().time() + timeout_s
        self._timeout_s = timeout_s
        self._events: asyncio.Queue[tuple[int, Generated | Refused]] = asyncio.Queue()
        self._outcome = "cancelled"
        self.choices: list[Choice] = []
        self.scores: dict[int, Scores] = {}  # of prompt and response, by choice
        self._jobs: list[Job] = []
        for p, (tokens, max_tokens) in enumerate(zip(asked.prompts, asked.max_tokens, strict=True)):
            for sample in range(asked.n):
                index = len(self.choices)
                request = Request(
                    tokens=tokens,
                    max_tokens=max_tokens,
                    sampling=asked.sampling,
                    prompt_id=p,
                    sample=sample,
                    seed=asked.seed,
                    ignore_stop=asked.ignore_stop,
                )
                self._jobs.append(Job(request, self._deliver_to(index), kept=asked.scored))
                self.choices.append(
                    Choice(index, renderer.decode, asked.sampling.stop, by_token=asked.logprobs)
                )
        engine.submit(self._jobs)

    async def deltas(self) -> AsyncIterator[tuple[Choice, Delta]]:
        """What is added to which choice, until all have ended. Raises Refused (504) past the deadline,
        and what the engine refuses."""
        n_unfinished = len(self.choices)
        while n_unfinished:
            index, event = await self._in_time(self._events.get())
            if isinstance(event, Refused):
                self._outcome = "failed"
                raise event
            choice = self.choices[index]
            if choice.finish:  # a stop string ended it, the engine had not heard yet
                continue
            if not any(choice.tokens for choice in self.choices):
                self._meters.first_token_s.observe(time.monotonic() - self._start)
            delta = choice.take(event)
            if choice.finish:
                n_unfinished -= 1
                if not event.finish and not self.asked.scored:
                    self._engine.cancel(self._jobs[index])
            if not n_unfinished:
                self._outcome = "done"
            yield choice, delta

    async def finish(self) -> None:
        """All choices ended, and scored where that is asked for."""
        scoring = {}
        async for choice, _ in self.deltas():
            if choice.finish and self.asked.scored:
                scoring[choice.index] = self._score(choice)
        for index, scores in scoring.items():
            self.scores[index] = await self._in_time(asyncio.wrap_future(scores))

    def close(self) -> None:
        """Ends what is not finished and counts the request. Has to be called once."""
        for choice, job in zip(self.choices, self._jobs, strict=True):
            if not choice.finish:
                self._engine.cancel(job)
        meters = self._meters
        endpoint = "chat" if self.asked.chat else "completions"
        meters.requests.labels(endpoint, self._outcome).inc()
        meters.request_s.observe(time.monotonic() - self._start)
        meters.prompt_tokens.inc(self.asked.n_prompt_tokens)
        meters.response_tokens.inc(self.n_tokens)

    @property
    def step(self) -> int | None:
        """Of the run whose weights answer, from the first delta on; None where they are of no checkpoint."""
        return self._jobs[0].step

    @property
    def n_tokens(self) -> int:
        return sum(len(choice.tokens) for choice in self.choices)

    def prompt_of(self, choice: Choice) -> np.ndarray:
        return self.asked.prompts[choice.index // self.asked.n]

    async def _in_time[T](self, wait: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout_at(self._deadline):
                return await wait
        except TimeoutError:
            self._outcome = "timeout"
            raise Refused(
                504,
                f"the answer took longer than {self._timeout_s:g} s; ask for fewer tokens or try again later",
                code="timeout",
            ) from None

    def _score(self, choice: Choice) -> Future[Scores]:
        tokens = np.concatenate([self.prompt_of(choice), np.array(choice.tokens, np.int32)])
        temperature = self.asked.sampling.temperature
        return self._engine.conclude(
            self._jobs[choice.index],
            lambda params: score(params, tokens, temperature=temperature, rules=DECODE),
        )

    def _deliver_to(self, index: int) -> Callable[[Generated | Refused], None]:
        loop = asyncio.get_running_loop()

        def deliver(event: Generated | Refused) -> None:
            loop.call_soon_threadsafe(self._events.put_nowait, (index, event))

        return deliver
