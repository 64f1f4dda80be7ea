"""The HTTP side: routes, the API key, answers whole or as server-sent events."""

import asyncio
import contextlib
import dataclasses
import hmac
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from jaxrl.data.chat import ChatRenderer
from jaxrl.serve.checkpoint_watcher import Follower
from jaxrl.serve.engine_thread import EngineThread
from jaxrl.serve.errors import Refused
from jaxrl.serve.metrics import Meters
from jaxrl.serve.openai_format import Json, Writer
from jaxrl.serve.request import Asked, Limits, read_chat, read_completion
from jaxrl.serve.response import Answer

RETRY_S = 1  # what a client is told to wait before it tries again
BODY_BYTES = 64 << 20  # of a request at most

Read = Callable[[Any, ChatRenderer, Limits], Asked]


@dataclasses.dataclass(frozen=True)
class Service:
    """What the routes work with."""

    limits: Limits
    renderer: ChatRenderer
    engine: EngineThread
    meters: Meters
    api_key: str  # "" = none is asked for
    timeout_s: float
    follower: Follower | None = None  # of a run
    started: int = dataclasses.field(default_factory=lambda: int(time.time()))

    def app(self) -> Starlette:
        @contextlib.asynccontextmanager
        async def life(_: Starlette) -> AsyncIterator[None]:
            self.engine.start()
            if self.follower is not None:
                self.follower.start()
            yield
            if self.follower is not None:
                self.follower.stop()
            await asyncio.to_thread(self.engine.stop)

        return Starlette(
            routes=[
                Route("/v1/chat/completions", self.guarded(self.chat), methods=["POST"]),
                Route("/v1/completions", self.guarded(self.completions), methods=["POST"]),
                Route("/v1/models", self.guarded(self.models)),
                Route("/v1/models/{name:path}", self.guarded(self.model)),
                Route("/health", self.health),
                Route("/metrics", self.metrics),
            ],
            exception_handlers={Refused: refuse, HTTPException: refuse_http, Exception: fail},
            lifespan=life,
            max_body_size=BODY_BYTES,
        )

    def guarded(self, endpoint: Callable[[Request], Awaitable[Response]]):
        """The endpoint, for clients that send the API key."""

        async def checked(request: Request) -> Response:
            sent = request.headers.get("authorization", "").removeprefix("Bearer ")
            if self.api_key and not hmac.compare_digest(sent.encode(), self.api_key.encode()):
                raise Refused(
                    401,
                    "the API key is missing or wrong; send 'Authorization: Bearer KEY'",
                    code="invalid_api_key",
                )
            return await endpoint(request)

        return checked

    async def chat(self, request: Request) -> Response:
        return await self.answer(request, read_chat)

    async def completions(self, request: Request) -> Response:
        return await self.answer(request, read_completion)

    async def answer(self, request: Request, read: Read) -> Response:
        try:
            raw = await request.body()
        except ClientDisconnect as problem:
            raise gone() from problem
        try:
            body = json.loads(raw)
            json.dumps(body, ensure_ascii=False).encode()  # fails for half a surrogate pair
        except ValueError as problem:
            raise Refused(400, f"the body of the request is not JSON: {problem}") from problem
        asked = read(body, self.renderer, self.limits)
        answer = Answer(asked, self.renderer, self.engine, self.meters, timeout_s=self.timeout_s)
        writer = Writer(answer, self.renderer, self.limits.name)
        if asked.stream:
            return EventStream(answer, writer)
        with contextlib.closing(answer):
            await while_connected(request, answer.finish())
            return JSONResponse(writer.whole())

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        if request.path_params["name"] != self.limits.name:
            raise Refused(404, f"only {self.limits.name!r} is served here", code="model_not_found")
        return JSONResponse(self._model())

    async def health(self, request: Request) -> Response:
        alive = self.engine.alive
        return JSONResponse({"status": "ok" if alive else "stopped"}, 200 if alive else 503)

    async def metrics(self, request: Request) -> Response:
        return Response(self.meters.text(), media_type="text/plain; version=0.0.4")

    def _model(self) -> Json:
        return {
            "id": self.limits.name,
            "object": "model",
            "created": self.started,
            "owned_by": "jaxrl",
            "max_model_len": self.limits.context,
            "step": self.engine.step,
        }


class EventStream(StreamingResponse):
    """An answer as server-sent events. However it ends, what the engine still does for it ends, too."""

    def __init__(self, answer: Answer, writer: Writer):
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events(answer, writer), media_type="text/event-stream", headers=headers)
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.closing(self._answer):
            await super().__call__(scope, receive, send)


async def events(answer: Answer, writer: Writer) -> AsyncIterator[str]:
    asked, begun = answer.asked, False
    try:
        async for choice, delta in answer.deltas():
            for body in () if begun else writer.first():
                yield event(body)
            begun = True
            if delta.text or choice.finish or asked.logprobs or asked.return_token_ids:
                yield event(writer.chunk(choice, delta))
    except Refused as refused:
        yield event(refused.body())
        return
    if asked.include_usage:
        yield event(writer.last())
    yield "data: [DONE]\n\n"


def event(body: Json) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"


def gone() -> Refused:
    """Read by nobody; the number is the one that proxies log."""
    return Refused(499, "the client went away")


async def while_connected(request: Request, work: Awaitable[None]) -> None:
    """Does the work, unless the client goes away: then it raises Refused."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = asyncio.ensure_future(work), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise gone()
        tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()


async def refuse(_: Request, problem: Exception) -> Response:
    assert isinstance(problem, Refused)
    headers = {"Retry-After": str(RETRY_S)} if problem.status in (429, 503) else None
    return JSONResponse(problem.body(), problem.status, headers)


async def refuse_http(request: Request, problem: Exception) -> Response:
    """Starlette's own: no such path, no such method, a body too large."""
    assert isinstance(problem, HTTPException)
    said = f"{request.method} {request.url.path}: {problem.detail}"
    return JSONResponse(Refused(problem.status_code, said).body(), problem.status_code)


async def fail(_: Request, problem: Exception) -> Response:
    said = f"the server failed ({type(problem).__name__})"
    return JSONResponse(Refused(500, said).body(), 500)
