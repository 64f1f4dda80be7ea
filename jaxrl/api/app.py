"""The HTTP application of the training API: routes, keys and long polls."""

import asyncio
import contextlib
import dataclasses
import functools
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from jaxrl.api.fields import SampleRequest
from jaxrl.api.service import Service
from jaxrl.api.store import FAILED, PENDING
from jaxrl.http.body import SMALL_BYTES, BodyReader
from jaxrl.http.errors import RequestError
from jaxrl.http.openai import read_object
from jaxrl.http.replies import ERROR_HANDLERS, client_key, while_connected

PROTOBUF = "application/x-protobuf"
PROTOBUF_KINDS = ("sample", "forward_backward")  # of results; the others are JSON
POLL_S = 30.0  # clients wait 45 s for the answer
MAX_VALUES = 2_000_000  # of a JSON body: tokens of a prompt
CLIENT_CONFIG = {  # what the server does not have, and requests of a client in order
    "pjwt_auth_enabled": False,
    "parallel_fwdbwd_chunks": False,
    "proto_compress_fwdbwd": False,
    "sample_use_retrieve_futures": False,
    "custom_loss_server_side": False,
    "sample_join_sampling_session": False,
}
DYNAMIC_CONFIG = {"sample_cancel_enabled": False}
Answer = Callable[[str, Mapping[str, Any]], Any]  # (client, body) -> the response's JSON


@dataclasses.dataclass(frozen=True)
class ApiApp:
    """The routes of a service."""

    service: Service
    bodies: BodyReader
    keys: frozenset[str]  # empty: every key is accepted

    def app(self) -> Starlette:
        service = self.service

        @contextlib.asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            service.start()
            yield
            await service.stop()

        answers: dict[str, Answer] = {
            "optim_step": service.optim_step,
            "client/config": lambda client, body: CLIENT_CONFIG,
            "client/dynamic_config": lambda client, body: DYNAMIC_CONFIG,
            "telemetry": lambda client, body: {"status": "accepted"},
            "create_session": service.create_session,
            "session_heartbeat": service.heartbeat,
            "create_model": service.create_model,
            "get_info": service.info,
            "load_weights": service.load_weights,
            "save_weights": service.save_weights,
            "save_weights_for_sampler": service.save_for_sampler,
            "save_weights_external": service.save_external,
            "create_sampling_session": service.create_sampling_session,
            "weights_info": service.weights_info,
        }
        lists = {
            "healthz": lambda client, path: {"status": "ok"},
            "get_server_capabilities": service.capabilities,
            "training_runs": service.training_runs,
            "training_runs/{model}": service.training_run,
            "training_runs/{model}/checkpoints": service.checkpoints_of,
            "checkpoints": service.checkpoints,
            "sessions": service.sessions,
            "sessions/{session}": service.session,
            "samplers/{sampler}": service.sampler,
        }
        checkpoint = "/api/v1/training_runs/{model}/checkpoints/{kind}/{name}"
        return Starlette(
            routes=[
                # The first ones are those of every step: routes are tried in this order.
                Route("/api/v1/retrieve_future", self.retrieve, methods=["POST"]),
                Route("/api/v1/forward_backward", self.forward_backward, methods=["POST"]),
                Route("/api/v1/asample", self.sample, methods=["POST"]),
                *(
                    Route(f"/api/v1/{n}", self.post(f), methods=["POST"])
                    for n, f in answers.items()
                ),
                *(Route(f"/api/v1/{n}", self.get(f)) for n, f in lists.items()),
                Route(checkpoint, self.delete_checkpoint, methods=["DELETE"]),
                Route("/metrics", self.prometheus),
            ],
            exception_handlers=ERROR_HANDLERS,
            lifespan=lifespan,
        )

    def client(self, request: Request) -> str:
        """The client that a request's key stands for. Raises RequestError (401) without one."""
        key = client_key(request)
        known = key in self.keys if self.keys else bool(key)
        if not known:
            raise RequestError(
                401,
                "the API key is missing or wrong; set TINKER_API_KEY, or api_key of ServiceClient, "
                "to a key of the server's --keys",
                code="invalid_api_key",
            )
        return hashlib.sha256(key.encode("latin-1")).hexdigest()[:32]

    async def body(self, request: Request) -> Mapping[str, Any]:
        async with self.bodies.read(request) as raw:
            return await parsed(raw, functools.partial(read_object, max_values=MAX_VALUES))

    def post(self, answer: Answer) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            client = self.client(request)
            found = answer(client, await self.body(request))
            await self.service.commits.wait()
            return JSONResponse(found)

        return endpoint

    def get(self, answer: Answer) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            found = dict(request.query_params) | request.path_params
            return JSONResponse(answer(self.client(request), found))

        return endpoint

    async def forward_backward(self, request: Request) -> Response:
        client = self.client(request)
        if not request.headers.get("content-type", "").startswith(PROTOBUF):
            raise RequestError(415, f"send the body as {PROTOBUF}, as tinker 0.38 does")
        if request.headers.get("content-encoding", "identity") != "identity":
            raise RequestError(415, "compressed bodies are not supported")
        async with self.bodies.read(request) as raw:
            call = await parsed(raw, self.service.parse_training)
        found = self.service.forward_backward(client, call)
        await self.service.commits.wait()
        return JSONResponse(found)

    async def sample(self, request: Request) -> Response:
        client = self.client(request)

        def parse(raw: bytes) -> tuple[Mapping[str, Any], SampleRequest]:
            body = read_object(raw, max_values=MAX_VALUES)
            return body, self.service.parse_sample(body)

        async with self.bodies.read(request) as raw:
            call = await parsed(raw, parse)
        found = self.service.sample(client, *call)
        await self.service.commits.wait()
        return JSONResponse(found)

    async def retrieve(self, request: Request) -> Response:
        """The result of a request, or after POLL_S that it is still pending."""
        client, name = self.client(request), (await self.body(request)).get("request_id")
        result = self.service.result(str(name), client)
        if result.state == PENDING:
            await while_connected(request, self.service.results.wait(str(name), POLL_S))
            result = self.service.result(str(name), client)
        if result.state == PENDING:
            pending = {"type": "try_again", "request_id": name, "queue_state": "active"}
            return JSONResponse(pending)
        encoded = result.state != FAILED and result.kind in PROTOBUF_KINDS
        return Response(result.body, media_type=PROTOBUF if encoded else "application/json")

    async def delete_checkpoint(self, request: Request) -> Response:
        self.service.delete_checkpoint(self.client(request), request.path_params)
        await self.service.commits.wait()
        return Response(status_code=204)

    async def prometheus(self, request: Request) -> Response:
        return Response(self.service.metrics.text(), media_type="text/plain; version=0.0.4")


async def parsed[T](raw: bytes, parse: Callable[[bytes], T]) -> T:
    """The parsed body. A large one is parsed in another thread, so that other clients are served.

    For a small one the thread would cost more than the parsing.
    """
    return parse(raw) if len(raw) <= SMALL_BYTES else await asyncio.to_thread(parse, raw)
