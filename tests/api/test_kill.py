"""SIGKILL of the whole server at random moments, while clients work."""

import contextlib
import dataclasses
import itertools
import random
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx2 as httpx
import numpy as np
import pytest

from jaxrl.api.store import RESTARTED
from tests.api.api_cases import Client, arguments, loss_sum

pytestmark = pytest.mark.thorough  # three starts of a server

N_KILLS, N_CLIENTS = 2, 2
PROMPT = np.arange(5, 25)
DATA = [(PROMPT, {"target_tokens": PROMPT + 1})]


@dataclasses.dataclass
class Recorder(Client):
    """A client that keeps what the server has acknowledged."""

    accepted: list[dict] = dataclasses.field(default_factory=list)  # futures
    results: dict[str, bytes] = dataclasses.field(default_factory=dict)  # by request
    states: dict[str, float] = dataclasses.field(default_factory=dict)  # loss, by saved state
    n_models: int = 0

    def call(self, path, body):
        found = super().call(path, body)
        if "request_id" in found:
            self.accepted.append(found)
        return found

    def poll(self, future):
        response = super().poll(future)
        self.results[future["request_id"]] = response.content
        return response

    def new_number(self) -> int:
        self.n_models += 1
        return self.n_models

    def loss(self, model: str) -> float:
        return loss_sum(self.wait(self.train(model, "cross_entropy", DATA, forward_only=True)))

    def work(self) -> None:
        """Trains a model, samples, and saves its state, again and again until the server ends."""
        with contextlib.suppress(httpx.TransportError):
            model = self.create(self.new_number())
            for i in itertools.count():
                futures = [self.train(model, "cross_entropy", DATA), self.step(model)]
                sampler = self.sampler(model, 100 * self.n_models + i)
                futures.append(self.sample(sampler, 0, PROMPT[:4].tolist()))
                saved = self.model_call("save_weights", model)
                path = self.wait(saved).json()["path"]
                self.states[path] = self.loss(model)
                for future in futures:
                    self.wait(future)

    def check(self) -> None:
        """All that was acknowledged is there after a restart."""
        for request, content in self.results.items():
            again = self.send("retrieve_future", {"request_id": request})
            assert (again.status_code, again.content) == (200, content), request
        lost = [one for one in self.accepted if one["request_id"] not in self.results]
        for future in lost:
            response = self.send("retrieve_future", {"request_id": future["request_id"]})
            if ":sample:" in future["request_id"] and response.status_code == 410:
                continue  # the package tinker sends the sample again
            assert response.status_code == 200, response.text
            if b'{"error": ' in response.content:
                assert response.json() == {"error": RESTARTED, "category": "server"}
        listed = self.send("checkpoints?limit=1000", method="GET").json()["checkpoints"]
        assert set(self.states) <= {one["tinker_path"] for one in listed}

    def check_last_state(self) -> None:
        """The last state loads, and gives the loss that it had."""
        path, loss = list(self.states.items())[-1]
        number = self.new_number()
        body = {"session_id": self.session, "model_seq_id": number, "path": path}
        self.wait(self.call("load_weights", body | {"optimizer": True}))
        assert self.loss(f"{self.session}:train:{number}") == loss


@contextlib.contextmanager
def process(argv):
    """(a server in another process, its address)."""
    command = [sys.executable, "-m", "jaxrl.api", *argv]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            lines = (re.search(r"http://\S+:\d+", line) for line in server.stdout)
            yield server, next(filter(None, lines)).group()
        finally:
            server.kill()


def test_what_was_acknowledged_survives_a_kill_at_any_moment(model_folder, tmp_path):
    rng, argv = random.Random(0), arguments(model_folder, tmp_path)
    clients = [Recorder("", f"tml-{i}") for i in range(N_CLIENTS)]
    for kill in range(N_KILLS + 1):
        with process(argv) as (server, address):
            for client in clients:
                client.base = address
                if kill:
                    client.check()
                    client.check_last_state()
                else:
                    client.open()
            if kill == N_KILLS:
                return
            before = [len(client.states) for client in clients]
            with ThreadPoolExecutor(N_CLIENTS) as pool:
                jobs = [pool.submit(client.work) for client in clients]
                while any(len(c.states) < n + 2 for c, n in zip(clients, before, strict=True)):
                    assert not any(job.done() for job in jobs)
                    time.sleep(0.01)
                time.sleep(rng.random() / 2)
                server.kill()
            for job in jobs:
                job.result()
