"""Episodes in processes of their own, so that none can stop or crash a run, or another one."""

import contextlib
import dataclasses
import multiprocessing
import subprocess
import time
from multiprocessing import reduction
from multiprocessing.connection import Connection, wait
from typing import Any

from jaxrl.config.keys import EnvConfig
from jaxrl.environments.api import Turn
from jaxrl.workers.process import start_process

_START_S = 120.0  # imports of the environment


@dataclasses.dataclass
class _Episode:
    connection: Connection
    pid: int
    deadline: float = 0.0  # of the answer that is asked for; 0 = none is


class EnvironmentPool:
    """Up to cfg.workers episodes at a time. Use as a context manager, or call close().

    The constructor returns when the environment is imported. Raises ValueError for an unknown name or a module that
    cannot be imported. For one thread.
    """

    def __init__(self, cfg: EnvConfig):
        self._cfg = cfg
        self._episodes: dict[int, _Episode] = {}
        self._next = 0
        self._maker, self._process = self._start_maker()

    def __enter__(self) -> "EnvironmentPool":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Ends all episodes; no process is left behind."""
        for episode in self._episodes.values():
            episode.connection.close()
        self._episodes.clear()
        self._maker.close()  # it ends them and itself
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @property
    def n_free(self) -> int:
        """Episodes that may be started."""
        return self._cfg.workers - len(self._episodes)

    def start(self, prompt: dict[str, Any]) -> int:
        """Begins an episode, which `reset` gets `prompt`. Returns its number."""
        ours, theirs = multiprocessing.Pipe()
        try:
            pid = self._fork(theirs)
        except (EOFError, OSError):  # the maker was killed: with its episodes, or not
            self._maker.close()
            self._process.wait()
            self._maker, self._process = self._start_maker()
            pid = self._fork(theirs)
        theirs.close()
        self._next += 1
        self._episodes[self._next] = _Episode(ours, pid)
        self._ask(self._next, prompt)
        return self._next

    def step(self, episode: int, completion: str) -> None:
        """Tells an episode what the model said; `collect` gives its answer."""
        self._ask(episode, completion)

    def collect(self, timeout_s: float) -> list[tuple[int, Turn]]:
        """The answers that are there, waiting up to `timeout_s` for the first. An episode that raised, died or was late
        has ended, and its answer says why."""
        asked = {e.connection: number for number, e in self._episodes.items() if e.deadline}
        if not asked:
            return []
        due = min(self._episodes[number].deadline for number in asked.values())
        ready = wait(list(asked), timeout=max(0.0, min(timeout_s, due - time.monotonic())))
        found = [(n, self._answer(n)) for connection, n in asked.items() if connection in ready]
        now = time.monotonic()
        late = [n for n, e in self._episodes.items() if 0 < e.deadline < now]
        words = f"no answer within {self._cfg.timeout_s:g} s"
        found += [(number, Turn(error=words)) for number in late]
        for number, turn in found:
            if turn.error:
                self.end(number)
        return found

    def end(self, number: int) -> None:
        """Ends an episode, whatever it does; one that has ended is left alone."""
        episode = self._episodes.pop(number, None)
        if episode is None:
            return
        episode.connection.close()
        with contextlib.suppress(OSError):  # the maker is gone, and its episodes end by themselves
            self._maker.send(("end", episode.pid))

    def _ask(self, number: int, argument: Any) -> None:
        episode = self._episodes[number]
        episode.deadline = time.monotonic() + self._cfg.timeout_s
        with contextlib.suppress(OSError):  # it died; collect finds out
            episode.connection.send(argument)

    def _answer(self, number: int) -> Turn:
        episode = self._episodes[number]
        episode.deadline = 0.0
        try:
            return episode.connection.recv()
        except (EOFError, OSError):
            return Turn(error="the environment's process died")

    def _fork(self, theirs: Connection) -> int:
        self._maker.send(("start",))
        reduction.send_handle(self._maker, theirs.fileno(), self._process.pid)
        return self._maker.recv()

    def _start_maker(self) -> tuple[Connection, subprocess.Popen]:
        ours, process = start_process("jaxrl.environments.worker")
        ours.send((self._cfg.name, self._cfg.timeout_s))
        try:
            report = ours.recv() if ours.poll(_START_S) else f"its import took over {_START_S:g} s"
        except (EOFError, OSError):
            report = f"environment {self._cfg.name!r} ended the process that imports it"
        if report != "ready":
            ours.close()
            process.kill()
            process.wait()
            raise ValueError(report)
        return ours, process
