"""A response in progress: its choices grow with the results of the engine's thread."""

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Any

import numpy as np

from jaxrl.data.chat.encoding import ChatRenderer
from jaxrl.engine.api import Generated, Request
from jaxrl.http.errors import RequestError
from jaxrl.learner.image_encoder import ImageEncoder
from jaxrl.serve.choice import Choice, Delta, Detokenize
from jaxrl.serve.engine_thread import GenerationTask, ServingThread
from jaxrl.serve.metrics import ServerMetrics
from jaxrl.serve.requests.request import GenerationRequest
from jaxrl.serve.score import Scores, score
from sharding.rules import DECODE


class ActiveResponse:
    """The choices of one request. Created on the event loop; submits to the engine at once.

    The engine works on it until all choices have ended, or until `close`.
    Raises RequestError if the engine rejects the request.
    """

    def __init__(
        self,
        request: GenerationRequest,
        renderer: ChatRenderer,
        engine: ServingThread,
        metrics: ServerMetrics,
        *,
        workers: Executor,
        timeout_s: float,
        encoder: ImageEncoder | None = None,
    ):
        """`workers` detokenize and format, so that the event loop stays free for other clients.

        `encoder` computes the features of images for the request's adapter; None: text only.
        """
        self.request, self._workers, self._encoder = request, workers, encoder
        self._engine, self._metrics = engine, metrics
        self._start = time.monotonic()
        self._deadline = asyncio.get_running_loop().time() + timeout_s
        self._timeout_s = timeout_s
        self._events: asyncio.Queue[tuple[int, Generated | RequestError]] = asyncio.Queue()
        self._outcome = "cancelled"
        self.scores: dict[int, Scores] = {}  # of the prompt, by choice
        n_choices = len(request.prompts) * request.n
        self.choices = [
            Choice(
                i,
                decoder(renderer, request.kept_ids),
                request.sampling.stop,
                by_token=request.logprobs,
                min_tokens=request.min_tokens,
            )
            for i in range(n_choices)
        ]
        self._tasks = [self._task(i) for i in range(n_choices)]
        engine.submit(self._tasks)

    def _task(self, index: int) -> GenerationTask:
        """The engine task of a choice; the choices of a prompt are consecutive."""
        request = self.request
        prompt, sample = divmod(index, request.n)
        engine_request = Request(
            tokens=request.prompts[prompt],
            max_tokens=request.max_tokens[prompt],
            sampling=request.sampling,
            prompt_id=prompt,
            sample=sample,
            seed=request.seed,
            ignore_stop=request.ignore_stop,
            adjustments=request.adjustments,
            top_logprobs=request.logprobs and request.n_top > 0,
            adapter=request.adapter,
        )
        return GenerationTask(
            engine_request,
            self._deliver_to(index),
            keep_weights=request.needs_scoring,
            images=request.images,
            encoder=self._encoder,
        )

    async def deltas[T](
        self, write: Callable[[Choice, Delta], T]
    ) -> AsyncIterator[tuple[Choice, T]]:
        """The result of `write` for each delta, with its choice, until all choices have ended.

        `write` runs on a worker, one call at a time. Raises RequestError (504) after the timeout,
        and errors of the engine.
        """
        n_unfinished = len(self.choices)
        while n_unfinished:
            index, event = await self._before_deadline(self._events.get())
            if isinstance(event, Generated) and event.finish == "error":
                event = RequestError(400, f"the grammar of the response failed: {event.error}")
            if isinstance(event, RequestError):
                self._outcome = "failed"
                raise event
            choice = self.choices[index]
            if choice.finish_reason:  # ended by a stop string, and not yet cancelled in the engine
                continue
            if not any(choice.tokens for choice in self.choices):
                self._metrics.first_token_s.observe(time.monotonic() - self._start)
            written = await self.on_worker(_add, choice, event, write)
            if choice.finish_reason:
                n_unfinished -= 1
                if not event.finish and not self.request.needs_scoring:
                    self._engine.cancel(self._tasks[index])
            if not n_unfinished:
                self._outcome = "done"
            yield choice, written

    async def finish(self) -> None:
        """Waits until all choices have ended and, if required, are scored."""
        scoring = {}
        async for choice, _ in self.deltas(lambda choice, delta: None):
            if choice.finish_reason and self.request.needs_scoring:
                scoring[choice.index] = self._score(choice)
        for index, scores in scoring.items():
            self.scores[index] = await self._before_deadline(asyncio.wrap_future(scores))

    async def on_worker[T](self, work: Callable[..., T], *arguments: Any) -> T:
        """The result of `work`, called on a worker."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._workers, functools.partial(work, *arguments))

    def close(self) -> None:
        """Cancels unfinished choices and records the request's metrics. Call exactly once."""
        for choice, task in zip(self.choices, self._tasks, strict=True):
            if not choice.finish_reason:
                self._engine.cancel(task)
        metrics = self._metrics
        metrics.requests.labels(self.request.endpoint, self._outcome).inc()
        metrics.request_s.observe(time.monotonic() - self._start)
        metrics.prompt_tokens.inc(self.request.n_prompt_tokens)
        metrics.response_tokens.inc(self.n_tokens)

    def count_malformed_calls(self, n: int) -> None:
        """Adds tool calls that could not be read to the metrics."""
        self._metrics.malformed_calls.inc(n)

    @property
    def step(self) -> int | None:
        """Training step of the weights, known from the first delta on; None if not a checkpoint."""
        return self._tasks[0].step

    @property
    def n_tokens(self) -> int:
        return sum(len(choice.tokens) for choice in self.choices)

    def prompt_of(self, choice: Choice) -> np.ndarray:
        return self.request.prompts[choice.index // self.request.n]

    async def _before_deadline[T](self, result: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout_at(self._deadline):
                return await result
        except TimeoutError:
            self._outcome = "timeout"
            raise RequestError(
                504,
                f"the request took longer than {self._timeout_s:g} s; lower max_tokens or try "
                "again later",
                code="timeout",
            ) from None

    def _score(self, choice: Choice) -> Future[Scores]:
        tokens = self.prompt_of(choice)
        temperature, adapter = self.request.sampling.temperature, self.request.adapter
        return self._engine.finish_with_weights(
            self._tasks[choice.index],
            lambda params: score(
                params, tokens, temperature=temperature, adapter=adapter, rules=DECODE
            ),
        )

    def _deliver_to(self, index: int) -> Callable[[Generated | RequestError], None]:
        loop = asyncio.get_running_loop()

        def deliver(event: Generated | RequestError) -> None:
            loop.call_soon_threadsafe(self._events.put_nowait, (index, event))

        return deliver


def _add[T](choice: Choice, generated: Generated, write: Callable[[Choice, Delta], T]) -> T:
    return write(choice, choice.add(generated))


def decoder(renderer: ChatRenderer, kept_ids: frozenset[int]) -> Detokenize:
    """Tokens to text without special tokens, other than `kept_ids`."""
    if not kept_ids:
        return renderer.decode
    dropped = set(renderer.tokenizer.all_special_ids) - kept_ids

    def decode(tokens: Sequence[int]) -> str:
        return renderer.decode([t for t in tokens if t not in dropped], skip_special=False)

    return decode
