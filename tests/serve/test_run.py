import argparse
import socket
import urllib.parse

from jaxrl.http.connection import ConnectionLimits, HttpServer
from jaxrl.serve.run import run_server


def test_a_client_can_connect_once_the_address_is_known(monkeypatch):
    connected = []

    def title(address: str) -> str:
        parsed = urllib.parse.urlsplit(address)
        assert parsed.hostname and parsed.port
        socket.create_connection((parsed.hostname, parsed.port), timeout=5).close()
        connected.append(address)
        return address

    # These are for the whole process.
    for name in ("gc.freeze", "logging.basicConfig", "jaxrl.serve.run.default_on_signals"):
        monkeypatch.setattr(name, lambda **_: None)
    web = HttpServer(lambda: None, ConnectionLimits(), end_responses=lambda: None)
    monkeypatch.setattr(web, "run", lambda sockets: None)
    options = argparse.Namespace(host="127.0.0.1", port=0)
    assert run_server(options, lambda listening: web, title) == 0
    assert connected
