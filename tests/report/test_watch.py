"""Tests of jaxrl/report/watch.py: a page that follows a run."""

import contextlib
import http.client
import json
import socket
import threading
import time

import pytest

from jaxrl.report import watch
from jaxrl.report.__main__ import main
from jaxrl.report.watch import WatchServer
from tests.report.test_report import Page, sample, write_run


@pytest.fixture
def server(tmp_path):
    """A server for a run folder that does not exist yet."""
    with WatchServer(tmp_path / "run", "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def get(server, path, **headers):
    """(status, headers, body) of a request."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    try:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request("GET", path, headers=names)
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read().decode()
    finally:
        connection.close()


def test_the_page_waits_for_a_run_and_follows_it(server, tmp_path):
    status, _, text = get(server, "/")
    assert status == 200
    assert "There are no metrics in this run folder yet" in Page(text).words
    assert "This page waits for them" in Page(text).words
    versions = []
    for last in (1, 2):
        metrics = [{"step": step, "reward/mean": step / 4} for step in range(1, last + 1)]
        write_run(tmp_path / "run", metrics, [sample(last)])
        status, headers, text = get(server, "/data")
        versions.append(headers["ETag"])
        reward = json.loads(text)["charts"][0]
        assert (status, reward["title"]) == (200, "Reward")
        assert reward["lines"][0]["points"][-1] == [last, last / 4]
    assert versions[0] != versions[1]
    assert get(server, "/data", If_None_Match=versions[1])[0] == 304


def test_the_page_fetches_from_its_own_server_only(server):
    text = get(server, "/")[2]
    assert text.count("fetch(") == text.count('fetch("data"') == 1


def test_requests_for_another_host_name_are_refused(server):
    for name in ("evil.example", "evil.example:8700"):
        assert get(server, "/data", Host=name)[0] == 403
    assert get(server, "/data", Host="localhost:8700")[0] == 200
    assert get(server, "/other")[0] == 404


def test_images_of_samples_are_served_and_no_other_file(server, tmp_path):
    folder = tmp_path / "run" / "images"
    folder.mkdir(parents=True)
    (folder / f"{'a' * 16}.jpg").write_bytes(b"jpeg")
    status, _, text = get(server, f"/images/{'a' * 16}.jpg")
    assert (status, text) == (200, "jpeg")
    for path in (f"/images/{'b' * 16}.jpg", "/images/../config.json", "/images/"):
        assert get(server, path)[0] == 404


@pytest.mark.parametrize("sent", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: localhost\r\n"])
def test_half_a_request_does_not_hold_up_others(server, sent):
    with socket.create_connection(("127.0.0.1", server.server_port)) as half:
        half.sendall(sent)
        assert get(server, "/data")[0] == 200


def test_half_a_request_is_closed_after_the_limit(server, monkeypatch):
    monkeypatch.setattr(watch, "REQUEST_S", 0.1)
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=30) as half:
        half.sendall(b"GET / HT")
        assert half.recv(1) == b""


def test_connections_beyond_the_limit_are_closed_and_free_places_return(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "MAX_CONNECTIONS", 2)
    with WatchServer(tmp_path / "run", "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        address = ("127.0.0.1", server.server_port)
        halves = [socket.create_connection(address, timeout=30) for _ in range(2)]
        with socket.create_connection(address, timeout=30) as third:
            assert third.recv(1) == b""
        for half in halves:
            half.close()
        deadline = time.monotonic() + 30
        while True:
            with contextlib.suppress(OSError, http.client.HTTPException):
                assert get(server, "/data")[0] == 200
                break
            assert time.monotonic() < deadline
        server.shutdown()
        thread.join()


def test_a_port_in_use_and_a_file_are_refused(server, tmp_path, capsys):
    port = str(server.server_port)
    assert main([str(tmp_path / "run"), "--watch", "--port", port]) == 1
    assert f"port {port} of 127.0.0.1 cannot be used" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main([str(tmp_path / "file"), "--watch", "--port", "0"]) == 1
    assert "is not a folder" in capsys.readouterr().err
