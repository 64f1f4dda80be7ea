"""Requests to a small server: replies, failures by kind, limits of time and size, retries."""

import contextlib
import http.server
import json
import threading
import time

import pytest

from jaxrl.http.client import JsonSender, RequestFailed, with_retries


@pytest.fixture
def serve():
    with contextlib.ExitStack() as stack:

        def make(answer):
            """The URL of a server whose handlers call `answer(handler, body)`."""

            class Handler(http.server.BaseHTTPRequestHandler):
                def do_GET(self):
                    answer(self, None)

                def do_POST(self):
                    answer(self, json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

                def log_message(self, *_):
                    pass

            server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
            stack.callback(server.server_close)
            stack.callback(server.shutdown)
            return f"http://127.0.0.1:{server.server_port}/"

        yield make


def reply(handler, status, content=b"", *, length=None, **headers):
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    if length is not None:
        handler.send_header("Content-Length", str(length))
    handler.end_headers()
    handler.wfile.write(content)


def failure(url, body=None, *, timeout_s=5.0, **options):
    with pytest.raises(RequestFailed) as failed:
        JsonSender(**options).send(url, body, timeout_s=timeout_s)
    return failed.value


def test_a_body_is_posted_with_the_key_and_none_is_a_get(serve):
    url = serve(
        lambda handler, body: reply(
            handler, 200, json.dumps([body, handler.headers["Authorization"]]).encode()
        )
    )
    sender = JsonSender(api_key="k")
    assert json.loads(sender.send(url, {"a": 1}, timeout_s=5.0)) == [{"a": 1}, "Bearer k"]
    assert json.loads(JsonSender().send(url, timeout_s=None)) == [None, None]


def test_only_a_sender_with_cookies_sends_them(serve):
    def answer(handler, _):
        reply(handler, 200, (handler.headers["Cookie"] or "").encode(), Set_Cookie="session=7")

    url = serve(answer)
    for cookies, expected in ((True, b"session=7"), (False, b"")):
        sender = JsonSender(cookies=cookies)
        assert sender.send(url, timeout_s=5.0) == b""
        assert sender.send(url, timeout_s=5.0) == expected


@pytest.mark.parametrize(
    "content, message",
    [
        (b'{"error": {"message": "too long"}}', " (too long)"),
        (b'{"error": "no route"}', " (no route)"),
        (b"<html>", " (<html>)"),
        (b"", ""),
    ],
)
def test_a_status_is_a_failure_with_the_servers_message(serve, content, message):
    url = serve(lambda handler, _: reply(handler, 400, content))
    found = failure(url)
    assert str(found) == f"{url} returned status 400 Bad Request{message}"
    assert (found.kind, found.status, found.body) == ("status", 400, content)


@pytest.mark.parametrize(
    "status, final", [(400, True), (404, True), (408, False), (429, False), (503, False)]
)
def test_a_retry_may_help_with_some_statuses(serve, status, final):
    assert failure(serve(lambda handler, _: reply(handler, status))).final is final


def test_a_reply_that_is_too_long_or_incomplete_is_a_failure(serve):
    url = serve(lambda handler, _: reply(handler, 200, b"x" * 100))
    assert JsonSender(max_bytes=100).send(url, timeout_s=5.0) == b"x" * 100
    found = failure(url, max_bytes=99)
    assert (found.kind, found.final) == ("invalid", True)
    found = failure(serve(lambda handler, _: reply(handler, 200, b"x", length=2)))
    assert (found.kind, found.final) == ("unreachable", False)


def test_a_server_that_sends_byte_by_byte_is_a_timeout(serve):
    def answer(handler, _):
        reply(handler, 200)
        with contextlib.suppress(OSError):
            for _ in range(30):
                handler.wfile.write(b"x")
                time.sleep(0.05)

    start = time.monotonic()
    assert failure(serve(answer), timeout_s=0.2).kind == "timeout"
    assert time.monotonic() - start < 1
    assert failure("http://127.0.0.1:9/", timeout_s=0.0).kind == "timeout"
    assert failure("http://127.0.0.1:9/").kind == "unreachable"


def test_retries_end_with_success_a_final_failure_or_the_last_attempt():
    seen = []

    def send(attempt):
        seen.append(attempt)
        if attempt < 2:
            raise RequestFailed("status", f"failure {attempt}", final=final)
        return "reply"

    final = False
    assert with_retries(send, attempts=3, first_wait_s=0.0) == "reply" and seen == [0, 1, 2]
    seen.clear()
    with pytest.raises(RequestFailed, match="failure 1"):
        with_retries(send, attempts=2, first_wait_s=0.0)
    assert seen == [0, 1]
    seen.clear()
    with pytest.raises(RequestFailed, match="failure 0"):  # the next one would begin after the end
        with_retries(send, attempts=3, first_wait_s=60.0, end=time.monotonic() + 0.1)
    assert seen == [0]
    final = True
    with pytest.raises(RequestFailed, match="failure 0"):
        with_retries(send, attempts=3, first_wait_s=0.0)
