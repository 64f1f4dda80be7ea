"""The HTTP endpoint of a judge on the run's own engine: chat completions for reward workers.

The base URL is http://127.0.0.1:PORT/SECRET/v1, where SECRET is random: other programs of the
machine cannot ask. A request waits for the thread that owns the engine.
"""

import contextlib
import dataclasses
import http.server
import json
import queue
import secrets
import threading
from concurrent.futures import Future

from jaxrl.http.errors import RequestError
from jaxrl.json_text import Json, parse_json

MAX_REQUEST_BYTES = 16 << 20
_LOOPBACK = "127.0.0.1"


@dataclasses.dataclass(frozen=True, eq=False)
class JudgeCall:
    """A chat completion that a reward worker waits for."""

    body: Json
    reply: Future[Json] = dataclasses.field(default_factory=Future)

    def fail(self, status: int, message: str) -> None:
        self.reply.set_exception(RequestError(status, message))


class JudgeEndpoint:
    """Takes requests on threads of this process. Use as a context manager."""

    def __init__(self):
        self.calls: queue.SimpleQueue[JudgeCall] = queue.SimpleQueue()
        path = f"/{secrets.token_urlsafe(16)}/v1"
        calls = self.calls

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                status, body = 404, RequestError(404, "no such path").body()
                if self.path == f"{path}/chat/completions":
                    status, body = _answer(calls, self)
                text = json.dumps(body).encode()
                with contextlib.suppress(OSError):  # the client has timed out
                    self.send_response(status)
                    self.send_header("Content-Type", "application/json")
                    self.send_header("Content-Length", str(len(text)))
                    self.end_headers()
                    self.wfile.write(text)

            def log_message(self, format, *args):
                """Nothing: a line per request would flood the console."""

        class Server(http.server.ThreadingHTTPServer):
            request_queue_size = 1024  # connections that wait to be accepted

        self._server = Server((_LOOPBACK, 0), Handler)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), name="judge", daemon=True
        )
        self._thread.start()
        self.url = f"http://{_LOOPBACK}:{self._server.server_port}{path}"

    def __enter__(self) -> "JudgeEndpoint":
        return self

    def __exit__(self, *_) -> None:
        self._server.shutdown()
        self._thread.join()
        while not self.calls.empty():
            self.calls.get().fail(503, "the run ends")
        self._server.server_close()


def _answer(
    calls: queue.SimpleQueue[JudgeCall], request: http.server.BaseHTTPRequestHandler
) -> tuple[int, Json]:
    """(status, body) of a request, once the engine's thread has answered it."""
    try:
        n_bytes = int(request.headers.get("Content-Length", ""))
        if not 0 < n_bytes <= MAX_REQUEST_BYTES:
            return 413, RequestError(413, f"at most {MAX_REQUEST_BYTES} bytes are accepted").body()
        body = parse_json(request.rfile.read(n_bytes))
        if not isinstance(body, dict):
            raise ValueError("the body is no JSON object")
    except ValueError as error:
        return 400, RequestError(400, str(error)).body()
    call = JudgeCall(body)
    calls.put(call)
    try:
        return 200, call.reply.result()
    except RequestError as error:
        return error.status, error.body()
