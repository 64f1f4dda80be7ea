"""A page that follows a run, served over HTTP on this machine."""

import contextlib
import hashlib
import http.server
import json
import socket
import sys
import threading
from pathlib import Path
from typing import Any

from jaxrl.report.document import embedded
from jaxrl.report.page import page_data, render
from jaxrl.report.record import Record, read_record
from jaxrl.tracking.samples import IMAGE_NAME

FILES = ("config.json", "metrics.jsonl", "samples.jsonl")
REQUEST_S = 10.0  # for a request and its answer
MAX_CONNECTIONS = 64
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class RunPage:
    """The page of a run folder, which may not exist yet. Renders again only what has changed."""

    def __init__(self, run_dir: Path):
        self.run_dir = run_dir
        self._version, self._data = "", b""
        self._lock = threading.Lock()  # one thread at a time reads the files

    def page(self) -> bytes:
        with self._lock:
            return render(self._record(), self._name, live=True).encode()

    def data(self) -> tuple[str, bytes]:
        """(version, the page's data as JSON)."""
        with self._lock:
            version = self.version()
            if version != self._version:
                data = embedded(page_data(self._record(), self._name, live=True))
                self._version, self._data = version, data.encode()
            return version, self._data

    def image(self, path: str) -> bytes | None:
        """The file of an image of the samples; None for another path."""
        name = path.removeprefix("/")
        file = self.run_dir / name
        return file.read_bytes() if IMAGE_NAME.fullmatch(name) and file.is_file() else None

    def version(self) -> str:
        """Changes whenever a file of the run changes."""
        stats = [path.stat() for name in FILES if (path := self.run_dir / name).is_file()]
        parts = [(stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats]
        return f'"{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]}"'

    @property
    def _name(self) -> str:
        return self.run_dir.absolute().name

    def _record(self) -> Record:
        """The run so far; an empty record before it has begun."""
        if not self.run_dir.is_dir():
            return Record(config={}, series={}, samples=[])
        return read_record(self.run_dir)


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers / with the page and /data with its data."""

    server: "WatchServer"

    def setup(self) -> None:
        super().setup()
        self._timer = threading.Timer(REQUEST_S, self._hang_up)
        self._timer.daemon = True
        self._timer.start()

    def finish(self) -> None:
        self._timer.cancel()
        super().finish()

    def _hang_up(self) -> None:
        with contextlib.suppress(OSError):  # it has closed by itself
            self.connection.shutdown(socket.SHUT_RDWR)

    def do_GET(self) -> None:
        if not self._is_for_this_server():
            self._answer(403, "text/plain", b"open the page at the address that was printed\n")
        elif self.path == "/":
            self._answer(200, "text/html; charset=utf-8", self.server.run_page.page())
        elif self.path == "/data":
            version, data = self.server.run_page.data()
            if self.headers.get("If-None-Match") == version:
                self._answer(304, "application/json", b"", ETag=version)
            else:
                self._answer(200, "application/json", data, ETag=version)
        elif (image := self.server.run_page.image(self.path)) is not None:
            self._answer(200, "image/jpeg", image)
        else:
            self._answer(404, "text/plain", b"there are / and /data\n")

    def _is_for_this_server(self) -> bool:
        """Whether the request names this machine, if the server listens on loopback only.

        Otherwise a page on the internet could read the run through a name that resolves to
        127.0.0.1.
        """
        name = self.headers.get("Host", "").rpartition(":")[0].strip("[]")
        return self.server.host not in LOOPBACK or name in LOOPBACK

    def _answer(self, status: int, kind: str, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Cache-Control": "no-store", **headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Silent: a page that is open makes a request every few seconds."""


class WatchServer(http.server.ThreadingHTTPServer):
    """Serves the page of one run, each request in a thread. Raises OSError if the port is in use.

    A connection that does not send its request is closed after REQUEST_S, and those beyond
    MAX_CONNECTIONS at once.
    """

    def __init__(self, run_dir: Path, host: str, port: int):
        self.run_page, self.host = RunPage(run_dir), host
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__((host, port), Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """One line; nothing for a client that has gone."""
        error = sys.exception()
        if not isinstance(error, ConnectionError | TimeoutError):
            print(f"error: a request failed: {type(error).__name__}: {error}", file=sys.stderr)

    @property
    def address(self) -> str:
        return f"http://{self.host}:{self.server_port}/"


def watch(run_dir: Path, host: str, port: int) -> None:
    """Serves the page of a run until Ctrl-C.

    Raises ValueError if `run_dir` is a file or the port cannot be used.
    """
    if run_dir.exists() and not run_dir.is_dir():
        raise ValueError(f"{run_dir} is not a folder; pass a run folder, e.g. runs/quickstart")
    try:
        server = WatchServer(run_dir, host, port)
    except OSError as error:
        raise ValueError(
            f"port {port} of {host} cannot be used ({error.strerror or error}); set --port to "
            "another port, or to 0 for any free one, and --host to an address of this machine"
        ) from error
    with server:
        print(f"{run_dir} at {server.address} (Ctrl-C to stop)", flush=True)
        if not run_dir.is_dir():
            print("the run has not begun; the page waits for it", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print(file=sys.stderr)
