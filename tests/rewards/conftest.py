import contextlib
import http.server
import json
import threading

import pytest


class Server:
    """A local HTTP server; `answers` are returned in turn, the last one repeatedly."""

    def __init__(self, *answers):
        self.requests, self.answers = [], list(answers)
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.requests.append(body)
                answer = outer.answers.pop(0) if len(outer.answers) > 1 else outer.answers[0]
                found = answer(body) if callable(answer) else answer
                status = found if isinstance(found, int) else 200
                self.send_response(status)
                self.end_headers()
                with contextlib.suppress(BrokenPipeError):  # the client timed out
                    self.wfile.write(
                        found if isinstance(found, bytes) else json.dumps(found).encode()
                    )

            def log_message(self, *_):
                pass

        class Listener(http.server.ThreadingHTTPServer):
            request_queue_size = 128  # connections at once

        self.server = Listener(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/get_reward"

    def close(self):
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def serve():
    servers = []

    def make(*answers):
        servers.append(Server(*answers))
        return servers[-1]

    yield make
    for server in servers:
        server.close()
