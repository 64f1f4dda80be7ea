"""HTTP connections with time limits, so that slow clients do not hold the server's resources."""

import asyncio
import dataclasses
import json
from collections.abc import Callable
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol
from uvicorn.server import ServerState

from jaxrl.http.errors import RequestError

MAX_CHUNKS = 8192  # of a chunked body: parsing one takes 12 us, whatever its size
SHUTDOWN_TIMEOUT_S = 30  # for responses in progress; then they end with 503
ABORT_AFTER_S = 1  # for clients that do not read that 503


@dataclasses.dataclass(frozen=True)
class ConnectionLimits:
    """Number of connections, and time that a client may take."""

    n_connections: int = 512
    read_s: float = (
        30.0  # from the start of a connection or request to the end of the request's body
    )
    write_s: float = 30.0  # for which sent data may stay unread


class Connection(H11Protocol):
    """uvicorn's HTTP/1.1 connection with limits, and with errors in OpenAI's format."""

    limits = ConnectionLimits()

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ):
        super().__init__(config, server_state, app_state, _loop)
        self.conn = _Parser(h11.SERVER)
        self.request_start = self.loop.time()
        self._unsent_since: float | None = None

    @property
    def receiving(self) -> bool:
        """Whether the client has yet to send the rest of a request, or all of one."""
        incomplete = self.conn.their_state in (h11.IDLE, h11.SEND_BODY)
        return incomplete and not self.transport.is_closing()

    def connection_made(
        self, transport
    ) -> None:  # no type: the classes of uvloop are not asyncio's
        super().connection_made(transport)
        if len(self.connections) > self.limits.n_connections:
            self._make_room()

    def on_response_complete(self) -> None:
        self.request_start = self.loop.time()
        super().on_response_complete()

    def close_if_overdue(self, now: float) -> None:
        """Ends a connection whose client sends or reads too slowly. Call about once a second."""
        if self.transport.get_write_buffer_size() == 0:
            self._unsent_since = None
        elif self._unsent_since is None:
            self._unsent_since = now
        if self._unsent_since is not None and now - self._unsent_since > self.limits.write_s:
            self.transport.abort()
        elif self.receiving and now - self.request_start > self.limits.read_s:
            self.reject(408, f"the request was not complete after {self.limits.read_s:g} s")

    def reject(self, status: int, message: str) -> None:
        """Sends an error response, unless another response has started, and closes."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # for the application, which may be reading the body
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE) and not self.transport.is_closing():
            body = json.dumps(RequestError(status, message).body()).encode()
            headers = [
                ("content-type", "application/json"),
                ("content-length", str(len(body))),
                ("connection", "close"),
            ]
            for event in (
                h11.Response(
                    status_code=status, headers=headers, reason=STATUS_PHRASES.get(status, b"")
                ),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def send_400_response(self, msg: str) -> None:
        self.reject(400, msg)

    def shutdown(self) -> None:
        """Rejects a request that is not complete; a response in progress continues."""
        if self.receiving:
            self.reject(503, "the server is shutting down")
        else:
            super().shutdown()

    def _make_room(self) -> None:
        """Closes the connection that has waited longest for a request; this one if there is none.

        So connections that send nothing, however many, do not keep new ones from being served.
        """
        others = [
            c for c in self.connections if isinstance(c, Connection) and c.receiving and c != self
        ]
        oldest = min(others, key=lambda c: c.request_start, default=self)
        oldest.reject(503, f"all {self.limits.n_connections} connections are in use; try again")


class _Parser(h11.Connection):
    """Rejects bodies in so many chunks that parsing them would block the event loop."""

    n_chunks = 0

    def next_event(self):
        event = super().next_event()
        if isinstance(event, h11.Request):
            self.n_chunks = 0
        elif isinstance(event, h11.Data) and event.chunk_end:
            self.n_chunks += 1
            if self.n_chunks > MAX_CHUNKS:
                raise h11.RemoteProtocolError(f"the body has more than {MAX_CHUNKS} chunks")
        return event


class HttpServer(uvicorn.Server):
    """uvicorn with bounded connections.

    At shutdown `begin_shutdown` is called, and responses in progress have SHUTDOWN_TIMEOUT_S to
    end; then `end_responses` is called, which must make the application end them with an error.
    """

    def __init__(
        self,
        app: Callable[..., Any],
        limits: ConnectionLimits,
        end_responses: Callable[[], None],
        begin_shutdown: Callable[[], None] = lambda: None,
    ):
        config = uvicorn.Config(
            app,
            http=type("LimitedConnection", (Connection,), {"limits": limits}),
            ws="none",
            lifespan="on",
            log_level="error",
            server_header=False,
            callback_notify=self._close_overdue,
            timeout_notify=1,
            timeout_graceful_shutdown=SHUTDOWN_TIMEOUT_S + 2 * ABORT_AFTER_S,
        )
        super().__init__(config)
        self._end_responses, self._begin_shutdown = end_responses, begin_shutdown

    async def shutdown(self, sockets=None) -> None:
        self._begin_shutdown()
        loop = asyncio.get_running_loop()
        timers = [
            loop.call_later(SHUTDOWN_TIMEOUT_S, self._end_responses),
            loop.call_later(SHUTDOWN_TIMEOUT_S + ABORT_AFTER_S, self._abort_connections),
        ]
        await super().shutdown(sockets)
        for timer in timers:
            timer.cancel()

    async def _close_overdue(self) -> None:
        now = asyncio.get_running_loop().time()
        for connection in list(self.server_state.connections):
            if isinstance(connection, Connection):
                connection.close_if_overdue(now)

    def _abort_connections(self) -> None:
        for connection in list(self.server_state.connections):
            if isinstance(connection, Connection):
                connection.transport.abort()
