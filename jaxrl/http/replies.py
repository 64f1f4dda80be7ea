"""Shared parts of HTTP applications: error responses, bearer keys, disconnects, streamed events."""

import asyncio
import hmac
import json
from collections.abc import Awaitable, Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jaxrl.http.body import client_disconnected
from jaxrl.http.errors import RequestError, anthropic_body

RETRY = {"Retry-After": "1"}
HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 429: RETRY, 503: RETRY}  # of errors, by status


def client_key(request: Request) -> str:
    """The key of the header `Authorization: Bearer KEY`, or of Anthropic's `x-api-key: KEY`.

    "" if there is none.
    """
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return key.strip()
    return request.headers.get("x-api-key", "").strip()


def has_key(request: Request, key: str) -> bool:
    """Whether the request has this key; in constant time."""
    # Starlette decodes the bytes of a header as latin-1.
    return hmac.compare_digest(
        client_key(request).encode("latin-1"), key.encode(errors="surrogateescape")
    )


async def while_connected[T](request: Request, work: Awaitable[T]) -> T:
    """The result of the work; cancels it and raises RequestError if the client disconnects."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise client_disconnected()
        return task.result()
    finally:
        task.cancel()
        watch.cancel()


def event(body: dict[str, Any]) -> str:
    """A server-sent event."""
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"


END_OF_EVENTS = "data: [DONE]\n\n"


def is_messages(path: str) -> bool:
    """Whether the path is of Anthropic's Messages API, whose errors have another format."""
    return path.rstrip("/").endswith(("/v1/messages", "/v1/messages/count_tokens"))


def error_response(
    request: Request, error: RequestError, headers: Mapping[str, str] | None = None
) -> Response:
    """The response in the format of the API that the request is for."""
    body = anthropic_body(error) if is_messages(request.url.path) else error.body()
    return JSONResponse(body, error.status, headers)


async def handle_request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return error_response(request, error, HEADERS.get(error.status))


async def handle_http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own errors: unknown path, wrong method."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    return error_response(request, RequestError(error.status_code, message), error.headers)


async def handle_exception(request: Request, error: Exception) -> Response:
    message = f"the server failed ({type(error).__name__})"
    return error_response(request, RequestError(500, message))


ERROR_HANDLERS = {
    RequestError: handle_request_error,
    HTTPException: handle_http_exception,
    Exception: handle_exception,
}
