"""Runs each episode in a separate process, so that no episode can stop the run or another one."""

import contextlib
import dataclasses
import math
import socket
import subprocess
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxrl.config.keys import EnvConfig
from jaxrl.data.images.placeholders import with_own_images
from jaxrl.environments.api import StepLimits, Turn
from jaxrl.environments.messages import read_turn
from jaxrl.subprocesses.channel import Channel, ProtocolError, wait
from jaxrl.subprocesses.output import OutputLog, print_line
from jaxrl.subprocesses.process import (
    MAX_START_FAILURES,
    START_TIMEOUT_S,
    WorkerFailed,
    WorkerProcess,
)
from jaxrl.tool_calls.calls import ParsedTurn
from jaxrl.types import Prompt

_FORK_TIMEOUT_S = 30.0
_CLOSE_TIMEOUT_S = 10.0
_POLL_S = 1.0  # a dead process whose children hold its socket is noticed after this time


@dataclasses.dataclass
class _Episode:
    channel: Channel
    pid: int
    limit_s: float = 0.0  # for the pending result
    deadline: float = 0.0  # for the pending result; 0 = none is pending


class EnvironmentPool:
    """Up to cfg.workers episodes at a time. Use as a context manager, or call close().

    An episode is an object of env.name, one call of the agent env.agent, or one run of env.command.
    The constructor returns once its module is imported. Raises ValueError for an unknown name, a
    failed import or a program that does not exist. `write` gets each line that episodes print. Not
    thread-safe.
    """

    def __init__(self, cfg: EnvConfig, *, write: Callable[[str], None] = print_line):
        self._cfg = cfg
        self._key, self._spec = next((key, spec) for key, spec in cfg.kinds.items() if spec)
        self._limits = StepLimits(
            cfg.timeout_s, cfg.tool_timeout_s, cfg.max_calls_per_turn, cfg.max_result_chars
        )
        self.tools: list[dict[str, Any]] = []  # schemas of the environment's tools
        self._output = OutputLog(write)
        self._episodes: dict[int, _Episode] = {}
        self._last_id = 0
        try:
            self._server = self._start_server()
        except WorkerFailed as error:
            raise ValueError(str(error)) from error

    def __enter__(self) -> "EnvironmentPool":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Ends all episodes and every process."""
        for episode in self._episodes.values():
            episode.channel.close()
        self._episodes.clear()
        self._server.channel.close()  # the fork server then ends the episodes and itself
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._server.process.wait(timeout=_CLOSE_TIMEOUT_S)
        self._server.kill()

    @property
    def n_free(self) -> int:
        """Number of episodes that may be started."""
        return self._cfg.workers - len(self._episodes)

    def start(self, prompt: dict[str, Any]) -> int:
        """Starts an episode and calls its `reset` with `prompt`. Returns the episode's id.

        Raises ChildProcessError if the fork server has ended and cannot be started again.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                pid = self._fork(theirs)
            except BaseException:
                ours.close()
                raise
        self._last_id += 1
        self._episodes[self._last_id] = _Episode(Channel(ours), pid)
        self._send(self._last_id, prompt)
        return self._last_id

    def step(self, episode: int, turn: str | ParsedTurn) -> None:
        """Sends a turn of the model to an episode; `collect` returns the result.

        Text goes to the environment's `step`; the tool calls of a parsed turn are run.
        """
        self._send(episode, turn)

    def pause(self, episode: int) -> None:
        """Stops the time limit of an agent that waits for the model."""
        self._episodes[episode].deadline = math.inf

    def resume(self, episode: int) -> None:
        """Starts the time limit of an agent again: the model has answered."""
        self._episodes[episode].deadline = time.monotonic() + self._cfg.timeout_s

    def postpone(self, seconds: float) -> None:
        """Moves the time limits of pending results by a time without `collect`."""
        for episode in self._episodes.values():
            episode.deadline += seconds if episode.deadline else 0.0

    def collect(self, timeout_s: float) -> list[tuple[int, Turn]]:
        """(episode, result) pairs that are ready, waiting up to `timeout_s` for the first.

        An episode that raised, died or exceeded its time limit is ended; its result has the error.
        """
        pending = {e.channel: number for number, e in self._episodes.items() if e.deadline}
        if not pending:
            return []
        due = min(self._episodes[number].deadline for number in pending.values())
        ready = wait(pending, min(timeout_s, due - time.monotonic()))
        found = [(pending[channel], self._receive(pending[channel])) for channel in ready]
        results = [(number, turn) for number, turn in found if turn is not None]
        now = time.monotonic()
        late = [n for n, e in self._episodes.items() if 0 < e.deadline < now]
        results += [(n, Turn(error=self._too_late(n))) for n in late]
        for number, turn in results:
            if turn.error:
                self.end(number)
        return results

    def end(self, number: int) -> None:
        """Ends an episode, running or not. An episode that already ended is ignored."""
        episode = self._episodes.pop(number, None)
        if episode is None:
            return
        episode.channel.close()
        # without the fork server its episodes end themselves
        self._server.channel.send(("end", episode.pid))

    def _send(self, number: int, argument: dict[str, Any] | str | ParsedTurn) -> None:
        episode = self._episodes[number]
        episode.limit_s = self._limits.seconds(argument)
        episode.deadline = time.monotonic() + episode.limit_s
        episode.channel.send(argument)

    def _receive(self, number: int) -> Turn | None:
        """The result of an episode; None if it has not arrived completely."""
        episode = self._episodes[number]
        try:
            message = episode.channel.receive()
            turn = None if message is None else read_turn(message)
        except EOFError:
            turn = Turn(error="the environment's process died")
        except ProtocolError as error:
            turn = Turn(error=f"user code wrote to the environment's socket: {error}")
        if turn is not None:
            episode.deadline = 0.0
        return turn

    def _too_late(self, number: int) -> str:
        limit_s = f"{self._episodes[number].limit_s:g} s"
        if self._cfg.program:
            return f"no request of the agent within {limit_s} (env.timeout_s)"
        return f"no answer within {limit_s} (env.timeout_s, and env.tool_timeout_s per tool call)"

    def _fork(self, theirs: socket.socket) -> int:
        """Has the fork server start an episode on the socket `theirs`. Returns its process id.

        Replaces a fork server that was killed, with or without its episodes, or hangs.
        """
        reason = ""
        for _ in range(MAX_START_FAILURES):
            try:
                if reason:
                    self._server = self._start_server()
                return self._request_fork(theirs)
            except WorkerFailed as error:
                reason = str(error)
                self._server.kill()
        headline, newline, frames = reason.partition("\n")
        raise ChildProcessError(
            f"the process that starts episodes failed {MAX_START_FAILURES} times in a row "
            f"({headline}); look for changed files and for memory or process limits, then resume "
            f"the run{newline}{frames}"
        )

    def _request_fork(self, theirs: socket.socket) -> int:
        channel = self._server.channel
        try:
            channel.send(("start",))
            channel.send_socket(theirs)
            match _reply(self._server, _FORK_TIMEOUT_S):
                case {"pid": int(pid)}:
                    return pid
                case {"error": str(error)}:
                    raise WorkerFailed(error)
                case other:
                    raise WorkerFailed(f"it sent {other!r:.80}")
        except (EOFError, OSError, ProtocolError) as error:
            raise WorkerFailed(f"{type(error).__name__} {error}".strip()) from error

    def _start_server(self) -> WorkerProcess:
        """Starts the fork server. Raises WorkerFailed if the environment cannot be imported."""
        server = WorkerProcess("jaxrl.environments.worker", "environment", self._output)
        server.channel.send((self._key, self._spec, self._limits))
        try:
            report = _reply(server, START_TIMEOUT_S)
        except TimeoutError:
            report = {"error": f"the import took over {START_TIMEOUT_S:g} s; do less at import"}
        except EOFError:
            status = server.reap()
            report = {
                "error": f"the process that imports it ended with status {status}; remove calls "
                "that exit at import"
            }
        except ProtocolError as error:
            report = {"error": f"its import wrote to the worker's socket: {error}"}
        match report:
            case {"tools": [*tools]}:
                self.tools = tools
                return server
            case {"error": str(error)}:
                server.kill()
                named = error if self._key in error else f"{self._key} {self._spec!r}: {error}"
                raise WorkerFailed(named)
            case other:
                server.kill()
                raise WorkerFailed(f"{self._key} {self._spec!r}: its import sent {other!r:.80}")


def episode_task(prompt: Prompt, seed: int) -> dict[str, Any]:
    """The start message of an episode's process; all samples of a prompt have the same seed."""
    return {
        "messages": with_own_images(prompt.messages, [placed.image for placed in prompt.images]),
        "answer": prompt.answer,
        "source": prompt.source,
        "extra": prompt.extra,
        "seed": int(np.random.SeedSequence([seed, prompt.id]).generate_state(1)[0]),
    }


def _reply(server: WorkerProcess, timeout_s: float) -> Any:
    """The fork server's next message.

    Raises EOFError if it ends, TimeoutError, or ProtocolError for anything but a message.
    """
    deadline = time.monotonic() + timeout_s
    while (message := server.channel.receive()) is None:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(f"no answer within {timeout_s:g} s")
        if not wait([server.channel], min(left_s, _POLL_S)) and server.ended:
            raise EOFError
    return message
