"""The HTTP endpoint of agents: an OpenAI base URL per episode, on a thread of the training run.

    POST {base_url}/chat/completions       a turn of the model
    POST {base_url}/responses              the same in the dialect of OpenAI's Responses API
    POST {base_url}/messages               the same in the dialect of Anthropic's Messages API
    POST {base_url}/messages/count_tokens  the tokens of a conversation
    POST {base_url}/reward                 the reward of the episode
    GET  {base_url}/models                 the name of the model

The base URL of an episode is http://127.0.0.1:PORT/episodes/ID/v1, without /v1 for Anthropic's
clients. A client whose base URL is fixed uses http://127.0.0.1:PORT/v1 with ID as its API key. ID
is random and ends with its episode.
"""

import asyncio
import contextlib
import dataclasses
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from jaxrl.data.images.placed import PlacedTokens
from jaxrl.data.images.reader import ImageReader
from jaxrl.environments.agent import LOOPBACK
from jaxrl.http.body import BodyReader
from jaxrl.http.connection import ConnectionLimits, HttpServer
from jaxrl.http.dialects.responses import responses_names
from jaxrl.http.errors import RequestError
from jaxrl.http.replies import END_OF_EVENTS, ERROR_HANDLERS, client_key, event, while_connected
from jaxrl.rollout.agents.chat import (
    MODEL,
    ChatRequest,
    Reply,
    chat_chunks,
    chat_completion,
    parse_chat,
    parse_reward,
)
from jaxrl.rollout.agents.dialects import WrittenChat, parse_count, parse_messages, parse_responses
from jaxrl.rollout.agents.episode import PlacedTurn

MAX_BODY_BYTES, MAX_BODIES_BYTES = 16 << 20, 256 << 20
N_CONNECTIONS = 4096
START_TIMEOUT_S = 30.0


@dataclasses.dataclass(frozen=True, eq=False)
class TurnCall:
    """Turns that an agent waits for. A client that disconnects cancels the futures."""

    episode: str
    request: ChatRequest
    futures: tuple[Future[Reply], ...]  # one per choice


@dataclasses.dataclass(frozen=True, eq=False)
class CountCall:
    """A conversation whose tokens an agent counts."""

    episode: str
    request: ChatRequest
    futures: tuple[Future[int], ...] = dataclasses.field(default_factory=lambda: (Future(),))


@dataclasses.dataclass(frozen=True, eq=False)
class RewardCall:
    """The reward and the counts of an episode."""

    episode: str
    numbers: dict[str, float]
    futures: tuple[Future[None], ...] = dataclasses.field(default_factory=lambda: (Future(),))


@dataclasses.dataclass(frozen=True, eq=False)
class RenderedTurn:
    """A turn whose messages a thread of the run has rendered, or failed to."""

    number: int  # the episode's, in the pool
    call: TurnCall
    placed: tuple[PlacedTurn, ...]  # of each choice
    tokens: Future[PlacedTokens]


WaitingCall = TurnCall | CountCall | RewardCall
AgentCall = WaitingCall | RenderedTurn | str  # str: the episode of a rejected request


class AgentEndpoint:
    """Serves the episodes that `open` has named. Use as a context manager, or call close().

    Requests wait in `calls` for the thread that owns the engine.
    """

    def __init__(self, images: ImageReader | None = None):
        """`images` reads those of messages; None is a run that reads text."""
        self._images = images
        self.calls: queue.SimpleQueue[AgentCall] = queue.SimpleQueue()
        self._episodes: set[str] = set()
        self._bodies = BodyReader(MAX_BODY_BYTES, MAX_BODIES_BYTES)
        self._listening = socket.create_server((LOOPBACK, 0))
        limits = ConnectionLimits(N_CONNECTIONS)
        self._server = HttpServer(self._app(), limits, end_responses=lambda: None)
        self._server.config.lifespan = "off"
        arguments = {"sockets": [self._listening]}
        self._thread = threading.Thread(
            target=self._server.run, kwargs=arguments, name="agents", daemon=True
        )
        self._thread.start()
        end = time.monotonic() + START_TIMEOUT_S
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > end:
                raise OSError(f"the endpoint of agents does not start on {LOOPBACK}")
            time.sleep(0.005)

    def __enter__(self) -> "AgentEndpoint":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._listening.close()

    def open(self) -> str:
        """A new episode's id."""
        name = secrets.token_urlsafe(16)
        self._episodes.add(name)
        return name

    def end(self, episode: str) -> None:
        """Rejects later requests of the episode."""
        self._episodes.discard(episode)

    def base_url(self, episode: str) -> str:
        return f"http://{LOOPBACK}:{self._listening.getsockname()[1]}/episodes/{episode}/v1"

    # On the thread of the endpoint

    def _app(self) -> Starlette:
        routes = []
        for prefix in ("/v1", "/episodes/{episode}/v1"):
            routes += [
                Route(f"{prefix}/chat/completions", self._chat, methods=["POST"]),
                Route(f"{prefix}/responses", self._responses, methods=["POST"]),
                Route(f"{prefix}/messages", self._messages, methods=["POST"]),
                Route(f"{prefix}/messages/count_tokens", self._count, methods=["POST"]),
                Route(f"{prefix}/reward", self._reward, methods=["POST"]),
                Route(f"{prefix}/models", self._models),
            ]
        return Starlette(routes=routes, exception_handlers=ERROR_HANDLERS)

    async def _chat(self, http_request: Request) -> Response:
        episode, request = await self._read(http_request, parse_chat)
        replies = await self._replies(http_request, episode, request)
        if not request.stream:
            return JSONResponse(chat_completion(replies))
        chunks = chat_chunks(replies, include_usage=request.include_usage)
        return _stream([*map(event, chunks), END_OF_EVENTS])

    async def _messages(self, http_request: Request) -> Response:
        return await self._write(http_request, parse_messages)

    async def _responses(self, http_request: Request) -> Response:
        with responses_names():
            return await self._write(http_request, parse_responses)

    async def _write(
        self, http_request: Request, parse: Callable[[bytes, ImageReader | None], WrittenChat]
    ) -> Response:
        """A turn in the dialect of a writer. A stream has it in one piece."""
        episode, (request, writer) = await self._read(http_request, parse)
        [reply] = await self._replies(http_request, episode, request)
        if not request.stream:
            return JSONResponse(writer.full(reply.piece, reply.end))
        start, piece = writer.start(reply.n_prompt_tokens), writer.add(reply.piece)
        return _stream([*start, *piece, *writer.end(reply.end)])

    async def _count(self, http_request: Request) -> Response:
        episode, request = await self._read(http_request, parse_count)
        call = CountCall(episode, request)
        [n_tokens] = await self._results(http_request, call, call.futures)
        return JSONResponse({"input_tokens": n_tokens})

    async def _reward(self, http_request: Request) -> Response:
        episode, numbers = await self._read(http_request, lambda raw, _: parse_reward(raw))
        call = RewardCall(episode, numbers)
        await self._results(http_request, call, call.futures)
        return JSONResponse({"reward": numbers["reward"]})

    async def _read[T](
        self, http_request: Request, parse: Callable[[bytes, ImageReader | None], T]
    ) -> tuple[str, T]:
        """(the episode, the parsed body) of a request. One that is rejected is counted."""
        episode = self._episode(http_request)
        async with self._bodies.read(http_request) as raw:
            with self._counted(episode):
                return episode, await asyncio.to_thread(parse, raw, self._images)

    async def _replies(
        self, http_request: Request, episode: str, request: ChatRequest
    ) -> list[Reply]:
        futures = tuple(Future() for _ in range(request.n))
        return await self._results(http_request, TurnCall(episode, request, futures), futures)

    async def _results[T](
        self, http_request: Request, call: WaitingCall, futures: tuple[Future[T], ...]
    ) -> list[T]:
        """The results of a call's futures, from the thread that owns the engine."""
        self.calls.put(call)
        waiting = asyncio.gather(*(asyncio.wrap_future(future) for future in futures))
        return await while_connected(http_request, waiting)

    async def _models(self, http_request: Request) -> Response:
        self._episode(http_request)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "jaxrl"}
        return JSONResponse({"object": "list", "data": [model]})

    @contextlib.contextmanager
    def _counted(self, episode: str) -> Iterator[None]:
        """Reports a request that is rejected."""
        try:
            yield
        except RequestError:
            self.calls.put(episode)
            raise

    def _episode(self, request: Request) -> str:
        """The id of the request's episode. Raises RequestError if there is none that runs."""
        in_path = request.path_params.get("episode")
        episode = client_key(request) if in_path is None else in_path
        if episode in self._episodes:
            return episode
        if in_path is None:
            raise RequestError(
                401, "the API key is not the id of a running episode", code="invalid_api_key"
            )
        raise RequestError(404, "this episode has ended", code="episode_ended")


def _stream(events: list[str]) -> Response:
    return StreamingResponse(iter(events), media_type="text/event-stream")
