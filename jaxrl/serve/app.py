"""The HTTP application: routes, API key, JSON responses and server-sent events."""

import asyncio
import contextlib
import dataclasses
import functools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from jaxrl.data.chat.encoding import ChatRenderer
from jaxrl.data.token_text import TokenTexts
from jaxrl.http.body import BodyReader
from jaxrl.http.dialects.responses import responses_names
from jaxrl.http.errors import RequestError
from jaxrl.http.replies import ERROR_HANDLERS, has_key, while_connected
from jaxrl.json_text import Json
from jaxrl.learner.image_encoder import ImageEncoder
from jaxrl.serve.checkpoint_watcher import CheckpointWatcher
from jaxrl.serve.choice import Choice, Delta
from jaxrl.serve.compilation import BackgroundCompiler
from jaxrl.serve.dialect_format import DialectFormatter
from jaxrl.serve.engine_thread import ServingThread
from jaxrl.serve.metrics import ServerMetrics
from jaxrl.serve.openai_format import ResponseFormatter
from jaxrl.serve.requests.dialects import (
    WrittenRequest,
    count_tokens,
    parse_messages,
    parse_responses,
    thought_markers,
)
from jaxrl.serve.requests.fields import unknown_model
from jaxrl.serve.requests.prompt import ServerLimits
from jaxrl.serve.requests.request import GenerationRequest, parse_chat, parse_completion
from jaxrl.serve.response import ActiveResponse
from jaxrl.serve.structured.grammar import JsonGrammar
from jaxrl.serve.tokenize import detokenize, tokenize
from jaxrl.tool_calls.reasoning import ReasoningSplitter

type Parse[T] = Callable[[bytes, ChatRenderer, ServerLimits], T]
Formatter = ResponseFormatter | DialectFormatter


@dataclasses.dataclass(frozen=True)
class ServerState:
    """The state shared by all routes."""

    limits: ServerLimits
    renderer: ChatRenderer
    engine: ServingThread
    compiler: BackgroundCompiler
    metrics: ServerMetrics
    bodies: BodyReader
    parsers: ThreadPoolExecutor  # parse, render and tokenize requests
    writers: ThreadPoolExecutor  # detokenize and format responses
    tokens: TokenTexts
    api_key: str  # "" = no key required
    timeout_s: float
    encoders: Sequence[ImageEncoder] = ()  # of the base model and each adapter; none: text only
    watcher: CheckpointWatcher | None = None  # with --follow
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    def app(self) -> Starlette:
        @contextlib.asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            self.engine.start()
            self.compiler.start()
            if self.watcher is not None:
                self.watcher.start()
            if self.limits.grammars is not None:
                self.limits.grammars.start()
            yield
            if self.watcher is not None:
                self.watcher.stop()
            self.compiler.stop()
            if self.limits.grammars is not None:
                await asyncio.to_thread(self.limits.grammars.close)
            await asyncio.to_thread(self.engine.stop)

        return Starlette(
            routes=[
                Route("/v1/chat/completions", self.with_key(self.chat), methods=["POST"]),
                Route("/v1/completions", self.with_key(self.completions), methods=["POST"]),
                Route("/v1/messages", self.with_key(self.messages), methods=["POST"]),
                Route("/v1/messages/count_tokens", self.with_key(self.count), methods=["POST"]),
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

    def begin_shutdown(self) -> None:
        """Fails requests whose schemas are not compiled yet."""
        if self.limits.grammars is not None:
            self.limits.grammars.stop()

    def with_key(self, endpoint: Callable[[Request], Awaitable[Response]]):
        """The endpoint, restricted to clients that send the API key."""

        async def checked(request: Request) -> Response:
            if self.api_key and not has_key(request, self.api_key):
                raise RequestError(
                    401,
                    "the API key is missing or wrong; send 'Authorization: Bearer KEY', or "
                    "'x-api-key: KEY' as Anthropic's clients do",
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
        response = self.start(await self.with_grammar(http_request, request))
        formatter = ResponseFormatter(response, self.renderer, self.tokens)
        return await self.respond(http_request, response, formatter)

    async def responses(self, request: Request) -> Response:
        with responses_names():
            return await self.translate(request, parse_responses)

    async def messages(self, request: Request) -> Response:
        return await self.translate(request, parse_messages)

    async def translate(self, http_request: Request, parse: Parse[WrittenRequest]) -> Response:
        request, writer = await self.parsed(http_request, parse)
        response = self.start(await self.with_grammar(http_request, request))
        chat = ResponseFormatter(response, self.renderer, self.tokens)
        in_thought = self.renderer.opens_thought(request.prompts[0])
        splitter = ReasoningSplitter(thought_markers(self.limits), in_thought=in_thought)
        formatter = DialectFormatter(response, chat, writer, splitter)
        return await self.respond(http_request, response, formatter)

    async def count(self, request: Request) -> Response:
        return JSONResponse(await self.parsed(request, count_tokens))

    async def tokenize(self, request: Request) -> Response:
        return JSONResponse(await self.parsed(request, tokenize))

    async def detokenize(self, request: Request) -> Response:
        return JSONResponse(await self.parsed(request, detokenize))

    async def parsed[T](self, http_request: Request, parse: Parse[T]) -> T:
        """The result of parsing a body, in another thread."""
        async with self.bodies.read(http_request) as raw:
            work = functools.partial(parse, raw, self.renderer, self.limits)
            return await asyncio.get_running_loop().run_in_executor(self.parsers, work)

    async def with_grammar(
        self, http_request: Request, request: GenerationRequest
    ) -> GenerationRequest:
        """The request with its grammar built, which may have to wait for the grammars of others.

        Raises RequestError as GrammarCompiler.build does, and if the client disconnects.
        """
        adjustments, compiler = request.adjustments, self.limits.grammars
        grammar = adjustments and adjustments.grammar
        if compiler is None or adjustments is None or not isinstance(grammar, JsonGrammar):
            return request
        building = asyncio.wrap_future(compiler.build(grammar))
        grammar = await while_connected(http_request, building)
        adjustments = dataclasses.replace(adjustments, grammar=grammar)
        return dataclasses.replace(request, adjustments=adjustments)

    def start(self, request: GenerationRequest) -> ActiveResponse:
        return ActiveResponse(
            request,
            self.renderer,
            self.engine,
            self.metrics,
            workers=self.writers,
            timeout_s=self.timeout_s,
            encoder=self.encoders[request.adapter] if self.encoders else None,
        )

    async def respond(
        self, http_request: Request, response: ActiveResponse, formatter: Formatter
    ) -> Response:
        """The response in full or as a stream."""
        if response.request.stream:
            return EventStream(response, formatter)
        with contextlib.closing(response):
            body = await while_connected(http_request, full_body(response, formatter))
            return Response(body, media_type="application/json")

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


async def full_body(response: ActiveResponse, formatter: Formatter) -> bytes:
    """The body of a response in full, after it has ended."""
    await response.finish()
    parts = formatter.full()
    body = bytearray()
    while part := await response.on_worker(_next_part, parts):
        body += part
    return bytes(body)


def _next_part(parts: Iterator[str]) -> bytes:
    """One part of a body, so that other responses get their turn before the next one."""
    return next(parts, "").encode()


async def stream_events(response: ActiveResponse, formatter: Formatter) -> AsyncIterator[str]:
    started = False

    def events(choice: Choice, delta: Delta) -> list[str]:
        nonlocal started
        start = () if started else formatter.start_events()
        started = True
        return [*start, *formatter.delta_events(choice, delta)]

    try:
        async for _, new in response.deltas(events):
            for one in new:
                yield one
    except RequestError as error:
        for one in formatter.error_events(error):
            yield one
        return
    for one in await response.on_worker(list, formatter.end_events()):
        yield one
