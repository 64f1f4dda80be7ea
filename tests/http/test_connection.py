"""Slow and broken clients: jaxrl/http/connection.py, without a model."""

import asyncio
import contextlib
import json
import socket
import time

import pytest
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

import jaxrl.http.connection as connection
from jaxrl.http.connection import MAX_CHUNKS, ConnectionLimits, HttpServer
from tests.serve.serve_cases import running, wait_until

START = b"POST / HTTP/1.1\r\nHost: x\r\n"
HALF = {  # requests that never end
    "nothing": b"",
    "half of the headers": START,
    "half of the body": START + b"Content-Length: 10\r\n\r\nhalf",
    "half of a chunked body": START + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhalf",
}
WHOLE = START + b"Content-Length: 5\r\n\r\nwhole"


class Server:
    """A server whose POST counts the body and whose GET streams without end."""

    def __init__(self, **limits):
        self.n_streams, self.ended = 0, asyncio.Event()
        routes = [Route("/", self.count, methods=["POST"]), Route("/", self.stream)]
        self.web = HttpServer(
            Starlette(routes=routes), ConnectionLimits(**limits), lambda: self.ended.set()
        )
        self.web.config.lifespan = "off"
        self.listening = socket.create_server(("127.0.0.1", 0))

    async def count(self, request):
        try:
            return JSONResponse({"n_bytes": len(await request.body())})
        except ClientDisconnect:
            return JSONResponse({}, 499)

    async def stream(self, request):
        async def parts():
            self.n_streams += 1
            try:
                while not self.ended.is_set():
                    yield b"x" * 100_000
                    await asyncio.sleep(0.001)
            finally:
                self.n_streams -= 1

        return StreamingResponse(parts())

    def connect(self, text=b""):
        client = socket.create_connection(self.listening.getsockname())
        client.settimeout(20)
        client.sendall(text)
        return client


@contextlib.contextmanager
def serving(**limits):
    server = Server(**limits)
    with server.listening, running(server.web, server.listening):
        yield server


def response(client):
    """(status, body) of a response, read until the connection closes or the body is complete."""
    text = b""
    while part := client.recv(65536):
        text += part
        head, found, body = text.partition(b"\r\n\r\n")
        if found and b"content-length: %d\r\n" % len(body) in head.lower() + b"\r\n":
            break
    head, _, body = text.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


@pytest.mark.parametrize("name", HALF)
def test_half_requests_end_with_408_and_others_are_served(name):
    with serving(read_s=0.5) as server:
        slow = [server.connect(HALF[name]) for _ in range(20)]
        status, body = response(server.connect(WHOLE))
        assert (status, body) == (200, {"n_bytes": 5})
        for client in slow:
            status, body = response(client)
            assert status == 408 and "not complete after 0.5 s" in body["error"]["message"]
            assert client.recv(1) == b""
        wait_until(lambda: not server.web.server_state.tasks)


def test_a_client_that_sends_byte_by_byte_is_closed():
    with serving(read_s=0.5) as server:
        client, end = server.connect(START + b"X: "), time.monotonic() + 10
        with pytest.raises(OSError):
            while time.monotonic() < end:
                client.sendall(b"x")
                time.sleep(0.05)


def test_a_kept_connection_has_the_full_time_for_each_request():
    with serving(read_s=1.0) as server:
        client = server.connect()
        for _ in range(3):
            client.sendall(WHOLE)
            assert response(client)[0] == 200
            time.sleep(0.6)


def test_half_requests_beyond_the_limit_of_connections_make_room():
    with serving(n_connections=10, read_s=60.0) as server:
        slow = [server.connect(HALF["half of the headers"]) for _ in range(30)]
        assert response(server.connect(WHOLE))[0] == 200
        assert len(server.web.server_state.connections) <= 10
        status, body = response(slow[0])  # the oldest
        assert status == 503 and "all 10 connections are in use" in body["error"]["message"]
        slow[-1].sendall(b"Content-Length: 1\r\n\r\nx")  # the newest is still served
        assert response(slow[-1])[0] == 200


def test_a_client_that_does_not_read_its_stream_is_closed():
    with serving(write_s=0.5) as server:
        clients = [server.connect(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n") for _ in range(3)]
        wait_until(lambda: server.n_streams == 3)
        wait_until(lambda: server.n_streams == 0)
        wait_until(lambda: not server.web.server_state.connections)
        assert clients


MALFORMED = {
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "null byte": b"GET /\x00 HTTP/1.1\r\nHost: x\r\n\r\n",
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "two lengths": START + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nwhole",
    "negative length": START + b"Content-Length: -1\r\n\r\n",
    "huge headers": START + b"X: " + b"x" * 100_000,
    "chunk size": START + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    "small chunks": START
    + b"Transfer-Encoding: chunked\r\n\r\n"
    + b"1\r\nx\r\n" * (MAX_CHUNKS + 1),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_http_gets_400_in_openais_format(name):
    with serving() as server:
        status, body = response(server.connect(MALFORMED[name]))
        assert status == 400 and body["error"]["type"] == "invalid_request_error"
        assert response(server.connect(WHOLE))[0] == 200


def test_shutdown_ends_unfinished_clients_without_a_traceback(monkeypatch, capfd):
    monkeypatch.setattr(connection, "SHUTDOWN_TIMEOUT_S", 0.5)
    monkeypatch.setattr(connection, "ABORT_AFTER_S", 0.2)
    with serving() as server:
        halves = [server.connect(text) for text in HALF.values()]
        whole = server.connect(WHOLE)
        assert response(whole)[0] == 200  # and the connection stays open
        streams = [server.connect(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n") for _ in range(2)]
        wait_until(lambda: server.n_streams == 2)
        reading = streams[0]
        server.web.should_exit = True
        while reading.recv(1 << 20):
            pass
    assert server.n_streams == 0 and len(halves) == 4
    assert capfd.readouterr().err == ""
