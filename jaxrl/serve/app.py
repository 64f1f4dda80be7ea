"""The HTTP application: routes, API key, JSON responses and server-sent events."""

import asyncio
import contextlib
import dataclasses
import functools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from jaxrl.data.chat.encoding import ChatRenderer
from jaxrl.http.body import BodyReader
from jaxrl.http.errors import RequestError
from jaxrl.http.replies import ERROR_HANDLERS, has_key, while_connected
from jaxrl.serve.checkpoint_watcher import CheckpointWatcher
from jaxrl.serve.compilation import BackgroundCompiler
from jaxrl.serve.engine_thread import EngineThread
from jaxrl.serve.metrics import ServerMetrics
from jaxrl.serve.openai_format import Json, ResponseFormatter
from jaxrl.serve.requests.fields import unknown_model
from jaxrl.serve.requests.prompt import Limits
from jaxrl.serve.requests.request import GenerationRequest, parse_chat, parse_completion
from jaxrl.serve.response import ActiveResponse
from jaxrl.serve.responses.format import ResponsesFormatter
from jaxrl.serve.responses.request import parse_responses
from jaxrl.serve.tokenize import detokenize, tokenize

type Parse[T] = Callable[[bytes, ChatRenderer, Limits], T]
Formatter = ResponseFormatter | ResponsesFormatter


@dataclasses.dataclass(frozen=True)
class Service:
    """The state shared by all routes."""

    limits: Limits
    renderer: ChatRenderer
    engine: EngineThread
    compiler: BackgroundCompiler
    metrics: ServerMetrics
    bodies: BodyReader
    parsers: ThreadPoolExecutor  # parse, render and tokenize requests
    api_key: str  # "" = no key required
    timeout_s: float
    watcher: CheckpointWatcher | None = None  # with --follow
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    def app(self) -> Starlette:
        @contextlib.asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            self.engine.start()
            self.compiler.start()
            if self.watcher is not None:
                self.watcher.start()
            yield
            if self.watcher is not None:
                self.watcher.stop()
            self.compiler.stop()
            await asyncio.to_thread(self.engine.stop)

        return Starlette(
            routes=[
                Route("/v1/chat/completions", self.with_key(self.chat), methods=["POST"]),
                Route("/v1/completions", self.with_key(self.completions), methods=["POST"]),
                Route("/v1/responses", self.with_key(self.responses), methods=["POST"]),
                Route("/tokenize", self.with_key(self.tokenize), methods=["POST"]),
                Route("/detokenize", self.with_key(self.detokenize), methods=["POST"]),
                Route("/v1/models", self.with_key(self.list_models)),
                Route("/v1/models/{name:path}", self.with_key(self.retrieve_model)),
                Route("/health", self.health),
                Route("/metrics", self.prometheus),
            ],
            exception_handlers=ERROR_HANDLERS,
            lifespan=lifespan,
        )

    def with_key(self, endpoint: Callable[[Request], Awaitable[Response]]):
        """The endpoint, restricted to clients that send the API key."""

        async def checked(request: Request) -> Response:
            if self.api_key and not has_key(request, self.api_key):
                raise RequestError(
                    401,
                    "the API key is missing or wrong; send 'Authorization: Bearer KEY'",
                    code="invalid_api_key",
                )
            return await endpoint(request)

        return checked

    async def chat(self, request: Request) -> Response:
        return await self.complete(request, parse_chat)

    async def completions(self, request: Request) -> Response:
        return await self.complete(request, parse_completion)

    async def complete(self, http_request: Request, parse: Parse[GenerationRequest]) -> Response:
        request = await self.parsed(http_request, parse)
        response = self.start(request)
        formatter = ResponseFormatter(response, self.renderer)
        return await self.respond(http_request, response, formatter)

    async def responses(self, http_request: Request) -> Response:
        request, repeated = await self.parsed(http_request, parse_responses)
        response = self.start(request)
        formatter = ResponsesFormatter(response, self.renderer, repeated)
        return await self.respond(http_request, response, formatter)

    async def tokenize(self, request: Request) -> Response:
        return JSONResponse(await self.parsed(request, tokenize))

    async def detokenize(self, request: Request) -> Response:
        return JSONResponse(await self.parsed(request, detokenize))

    async def parsed[T](self, http_request: Request, parse: Parse[T]) -> T:
        """The result of parsing a body, in another thread."""
        async with self.bodies.read(http_request) as raw:
            work = functools.partial(parse, raw, self.renderer, self.limits)
            return await asyncio.get_running_loop().run_in_executor(self.parsers, work)

    def start(self, request: GenerationRequest) -> ActiveResponse:
        return ActiveResponse(
            request, self.renderer, self.engine, self.metrics, timeout_s=self.timeout_s
        )

    async def respond(
        self, http_request: Request, response: ActiveResponse, formatter: Formatter
    ) -> Response:
        """The response in full or as a stream."""
        if response.request.stream:
            return EventStream(response, formatter)
        with contextlib.closing(response):
            await while_connected(http_request, response.finish())
            return JSONResponse(formatter.full())

    async def list_models(self, request: Request) -> Response:
        names = self.limits.model_names
        return JSONResponse({"object": "list", "data": list(map(self._model, names))})

    async def retrieve_model(self, request: Request) -> Response:
        if (name := request.path_params["name"]) not in self.limits.model_names:
            raise unknown_model(name, self.limits.model_names)
        return JSONResponse(self._model(name))

    async def health(self, request: Request) -> Response:
        alive = self.engine.alive
        return JSONResponse({"status": "ok" if alive else "stopped"}, 200 if alive else 503)

    async def prometheus(self, request: Request) -> Response:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4")

    def _model(self, name: str) -> Json:
        base = self.limits.model_name
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "jaxrl",
            "max_model_len": self.limits.max_model_len,
            "step": self.engine.step,
            "parent": None if name == base else base,  # of an adapter
        }


class EventStream(StreamingResponse):
    """A response as server-sent events; closes it when the stream ends for any reason."""

    def __init__(self, response: ActiveResponse, formatter: Formatter):
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        events = stream_events(response, formatter)
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._response = response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.closing(self._response):
            await super().__call__(scope, receive, send)


async def stream_events(response: ActiveResponse, formatter: Formatter) -> AsyncIterator[str]:
    started = False
    try:
        async for choice, delta in response.deltas():
            for one in () if started else formatter.start_events():
                yield one
            started = True
            for one in formatter.delta_events(choice, delta):
                yield one
    except RequestError as error:
        for one in formatter.error_events(error):
            yield one
        return
    for one in formatter.end_events():
        yield one
