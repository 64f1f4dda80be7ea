"""Runs each episode in a separate process, so that no episode can stop the run or another one."""

import contextlib
import dataclasses
import multiprocessing
import subprocess
import time
from multiprocessing import reduction
from multiprocessing.connection import Connection, wait
from typing import Any

from jaxrl.config.keys import EnvConfig
from jaxrl.environments.api import KEY, Turn
from jaxrl.workers.process import START_TIMEOUT_S, start_process


@dataclasses.dataclass
class _Episode:
    connection: Connection
    pid: int
    deadline: float = 0.0  # for the pending result; 0 = none is pending


class EnvironmentPool:
    """Up to cfg.workers episodes at a time. Use as a context manager, or call close().

    The constructor returns once the environment is imported. Raises ValueError for an unknown name
    or a module that cannot be imported. Not thread-safe.
    """

    def __init__(self, cfg: EnvConfig):
        self._cfg = cfg
        self._episodes: dict[int, _Episode] = {}
        self._last_id = 0
        self._server, self._process = self._start_server()

    def __enter__(self) -> "EnvironmentPool":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Ends all episodes and every process."""
        for episode in self._episodes.values():
            episode.connection.close()
        self._episodes.clear()
        self._server.close()  # the fork server then ends the episodes and itself
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @property
    def n_free(self) -> int:
        """Number of episodes that may be started."""
        return self._cfg.workers - len(self._episodes)

    def start(self, prompt: dict[str, Any]) -> int:
        """Starts an episode and calls its `reset` with `prompt`. Returns the episode's id."""
        ours, theirs = multiprocessing.Pipe()
        try:
            pid = self._fork(theirs)
        except (EOFError, OSError):  # the fork server was killed, with or without its episodes
            self._server.close()
            self._process.wait()
            self._server, self._process = self._start_server()
            pid = self._fork(theirs)
        theirs.close()
        self._last_id += 1
        self._episodes[self._last_id] = _Episode(ours, pid)
        self._send(self._last_id, prompt)
        return self._last_id

    def step(self, episode: int, completion: str) -> None:
        """Sends a turn of the model to an episode; `collect` returns the result."""
        self._send(episode, completion)

    def collect(self, timeout_s: float) -> list[tuple[int, Turn]]:
        """(episode, result) pairs that are ready, waiting up to `timeout_s` for the first.

        An episode that raised, died or exceeded its time limit is ended; its result has the error.
        """
        pending = {e.connection: number for number, e in self._episodes.items() if e.deadline}
        if not pending:
            return []
        due = min(self._episodes[number].deadline for number in pending.values())
        ready = wait(list(pending), timeout=max(0.0, min(timeout_s, due - time.monotonic())))
        results = [
            (n, self._receive(n)) for connection, n in pending.items() if connection in ready
        ]
        now = time.monotonic()
        late = [n for n, e in self._episodes.items() if 0 < e.deadline < now]
        error = f"no answer within {self._cfg.timeout_s:g} s (env.timeout_s)"
        results += [(number, Turn(error=error)) for number in late]
        for number, turn in results:
            if turn.error:
                self.end(number)
        return results

    def end(self, number: int) -> None:
        """Ends an episode, running or not. An episode that already ended is ignored."""
        episode = self._episodes.pop(number, None)
        if episode is None:
            return
        episode.connection.close()
        with contextlib.suppress(OSError):  # without the fork server its episodes end themselves
            self._server.send(("end", episode.pid))

    def _send(self, number: int, argument: Any) -> None:
        episode = self._episodes[number]
        episode.deadline = time.monotonic() + self._cfg.timeout_s
        with contextlib.suppress(OSError):  # it died; collect reports it
            episode.connection.send(argument)

    def _receive(self, number: int) -> Turn:
        episode = self._episodes[number]
        episode.deadline = 0.0
        try:
            return episode.connection.recv()
        except (EOFError, OSError):
            return Turn(error="the environment's process died")

    def _fork(self, theirs: Connection) -> int:
        """Has the fork server start an episode on the socket `theirs`. Returns its process id."""
        self._server.send(("start",))
        reduction.send_handle(self._server, theirs.fileno(), self._process.pid)
        return self._server.recv()

    def _start_server(self) -> tuple[Connection, subprocess.Popen]:
        ours, process = start_process("jaxrl.environments.worker")
        ours.send((self._cfg.name, self._cfg.timeout_s))
        try:
            report = (
                ours.recv()
                if ours.poll(START_TIMEOUT_S)
                else f"{KEY} {self._cfg.name!r}: the import took over {START_TIMEOUT_S:g} s; do "
                "less at import"
            )
        except (EOFError, OSError):
            report = (
                f"{KEY} {self._cfg.name!r} ended the process that imports it; remove calls that "
                "exit at import"
            )
        if report != "ready":
            ours.close()
            process.kill()
            process.wait()
            raise ValueError(report)
        return ours, process
