"""Runs calls of reward functions in worker processes and replaces the workers that fail.

A worker gets several calls at a time and answers them one by one. It reports that it begins, so
only the call that was running when a worker failed becomes an error; its other calls go to the next
free worker. A spare worker is started when a call has taken half of its time limit: if the call
times out, the replacement has already imported the functions.
"""

import collections
import dataclasses
import itertools
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxrl.config.keys import RewardConfig
from jaxrl.rewards.calls import (
    CallSettings,
    CallSignature,
    RewardResult,
    late,
    read_results,
    read_signatures,
)
from jaxrl.rewards.worker_thread import OwnFunctions, WorkerThread
from jaxrl.subprocesses.channel import ProtocolError, wait
from jaxrl.subprocesses.output import OutputLog
from jaxrl.subprocesses.process import (
    MAX_START_FAILURES,
    START_TIMEOUT_S,
    WorkerFailed,
    WorkerProcess,
)

_MAX_BATCH = 64  # calls per message
_WORKERS_PER_SPARE = 4
_POLL_S = 1.0  # between checks for processes that ended while their children hold the socket
_RETRY_S = 10.0  # pause before further starts if workers fail to start but others still run


CallKey = tuple[int, int]  # response, function


@dataclasses.dataclass(frozen=True)
class FunctionCall:
    """A call of one function, for one response or a batch."""

    items: tuple[int, ...]  # indices of the responses
    function: int
    n: int | None  # number of responses, with lists as arguments; None for one response
    arguments: dict[str, Any]
    limit_s: float


class TimedResult(NamedTuple):
    """A result and the seconds of its call."""

    result: RewardResult
    seconds: float


@dataclasses.dataclass
class _Worker:
    """A process or thread and its unanswered calls, numbered."""

    process: WorkerProcess | WorkerThread
    deadline: float  # of its start, then of its first call
    late_at: float = 0.0  # when the first call has taken half its time
    began_at: float = 0.0  # when it began the first call
    ready: bool = False
    running: bool = False  # it has begun the first call
    calls: collections.deque[tuple[int, FunctionCall]] = dataclasses.field(
        default_factory=collections.deque
    )

    @property
    def is_next(self) -> int:
        """The number of its first call; -1 if it has none."""
        return self.calls[0][0] if self.calls else -1


class CallRunner:
    """cfg.workers processes that run calls, and spares. Not thread-safe.

    With `own` functions the workers are threads of this process. The constructor returns once all
    workers have imported the functions. It raises ValueError if one cannot.
    """

    def __init__(
        self,
        cfg: RewardConfig,
        settings: Sequence[CallSettings],
        output: OutputLog,
        own: OwnFunctions | None = None,
    ):
        self.signatures: list[CallSignature] = []  # of the functions
        self._cfg, self._settings, self._output, self._own = cfg, settings, output, own
        self._workers: list[_Worker] = []
        self._queue: collections.deque[FunctionCall] = collections.deque()
        self._results: dict[CallKey, TimedResult] = {}  # not taken yet
        self._n_calls = 1  # per message
        self._numbers = itertools.count()  # of calls
        self._n_started = 0
        self._n_lost = 0  # workers in a row that failed before they began a call
        self._no_start_before = 0.0
        self._had_timeout = False
        try:
            while not self._all_ready:
                self._start_missing()
                quiet = not self._wait()
                for worker in self._workers:
                    self._receive(worker, check_ended=quiet)
        except WorkerFailed as error:
            self.close()
            raise ValueError(str(error)) from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Kills all workers and waits for them."""
        while self._workers:
            self._workers.pop().process.kill()

    def submit(self, calls: Sequence[FunctionCall]) -> list[CallKey]:
        """Queues calls, each with other responses than all before. Returns the keys of results.

        Raises ChildProcessError if no worker is left and none can be started.
        """
        if not self._busy:
            self._replace_failed(check_ended=True)  # since the last call
        self._queue.extend(calls)
        self._n_calls = max(1, min(_MAX_BATCH, len(self._queue) // (4 * self._cfg.workers)))
        return [(item, call.function) for call in calls for item in call.items]

    def advance(self, *, wait: bool) -> None:
        """Sends queued calls and takes results, waiting for something to happen if `wait`.

        Raises ChildProcessError if no worker is left and none can be started.
        """
        if not self._busy:
            return
        try:
            self._start_missing()
            self._send_calls(self._n_calls)
            quiet = not self._wait(_POLL_S if wait else 0.0)
            self._replace_failed(check_ended=quiet)
        except BaseException:
            self.close()
            raise

    def take(self, keys: Sequence[CallKey]) -> dict[CallKey, TimedResult] | None:
        """The results of calls: a score, or why there is none. None until all of them are known."""
        if any(key not in self._results for key in keys):
            return None
        return {key: self._results.pop(key) for key in keys}

    @property
    def _busy(self) -> bool:
        """Whether a call has no result yet."""
        return bool(self._queue) or any(worker.calls for worker in self._workers)

    @property
    def _all_ready(self) -> bool:
        """Whether all workers that the system started have imported the functions."""
        ready = [worker.ready for worker in self._workers]
        return all(ready) and (bool(ready) or not self._cfg.functions)

    def _start_missing(self) -> None:
        """Starts workers up to the configured number plus spares for late calls."""
        now = time.monotonic()
        if not self._cfg.functions or now < self._no_start_before:
            return
        n_late = sum(worker.running and now > worker.late_at for worker in self._workers)
        most = -(-self._cfg.workers // _WORKERS_PER_SPARE)
        n_spares = min(max(n_late, self._had_timeout), most)
        while len(self._workers) < self._cfg.workers + n_spares:
            self._n_started += 1
            name = f"reward worker {self._n_started}"
            try:
                process = self._start_worker(name)
            except WorkerFailed as error:
                self._lost(str(error))
                return
            process.channel.send((self._cfg.functions, self._settings))
            self._workers.append(_Worker(process, time.monotonic() + START_TIMEOUT_S))

    def _start_worker(self, name: str) -> WorkerProcess | WorkerThread:
        if self._own:
            return WorkerThread(self._own, name)
        return WorkerProcess("jaxrl.rewards.worker", name, self._output, ends_descendants=True)

    def _send_calls(self, n_calls: int) -> None:
        """Gives calls to free workers, unless the configured number of workers is busy."""
        n_free = self._cfg.workers - sum(bool(worker.calls) for worker in self._workers)
        free = [worker for worker in self._workers if worker.ready and not worker.calls]
        for worker in free[:n_free]:
            if not self._queue:
                return
            n = n_calls if self._queue[0].n is None else 1  # one batch per worker
            calls = [self._queue.popleft() for _ in range(min(n, len(self._queue)))]
            worker.calls.extend((next(self._numbers), call) for call in calls)
            worker.process.channel.send(
                [
                    (number, call.function, call.n, call.arguments, call.limit_s)
                    for number, call in worker.calls
                ]
            )
            self._set_deadline(worker)

    def _set_deadline(self, worker: _Worker) -> None:
        """Sets the deadline of the worker's first call."""
        if worker.calls:
            limit_s = worker.calls[0][1].limit_s
            worker.deadline = time.monotonic() + limit_s
            worker.late_at = worker.deadline - limit_s / 2

    def _wait(self, timeout_s: float = _POLL_S) -> bool:
        """Blocks until a worker has sent something or is late, at most `timeout_s`.

        Returns whether a worker has sent something.
        """
        now = time.monotonic()
        due = [now + timeout_s]
        for worker in self._workers:
            if worker.calls or not worker.ready:
                due.append(worker.late_at if now < worker.late_at else worker.deadline)
        channels = [worker.process.channel for worker in self._workers]
        return bool(wait(channels, min(due) - now))

    def _replace_failed(self, *, check_ended: bool) -> None:
        for worker in tuple(self._workers):
            try:
                self._receive(worker, check_ended=check_ended)
            except WorkerFailed as error:
                self._drop(worker, str(error))

    def _receive(self, worker: _Worker, *, check_ended: bool) -> None:
        """Handles what a worker has sent. Raises WorkerFailed if it must be replaced.

        A worker that ended has closed its socket, unless processes that it started hold it open:
        `check_ended` looks at the process itself.
        """
        try:
            ended = check_ended and worker.process.ended  # before the last messages are read
            self._handle_all(worker)
            if ended:
                raise EOFError
        except EOFError:
            status = worker.process.reap()
            raise WorkerFailed(
                f"the worker process died with status {status}"
                if worker.ready
                else f"a reward worker died at startup with status {status}; check the function's "
                "module"
            ) from None
        except ProtocolError as error:
            raise WorkerFailed(f"user code wrote to the worker's socket: {error}") from None
        if (worker.calls or not worker.ready) and time.monotonic() > worker.deadline:
            raise WorkerFailed(self._late(worker))

    def _late(self, worker: _Worker) -> str:
        if not worker.ready:
            return (
                f"importing the reward functions took over {START_TIMEOUT_S:g} s; do less at import"
            )
        self._had_timeout = True
        return late(self._settings[worker.calls[0][1].function].limit_s)

    def _handle_all(self, worker: _Worker) -> None:
        while (message := worker.process.channel.receive()) is not None:
            self._handle(worker, message)

    def _handle(self, worker: _Worker, message: Any) -> None:
        match message:
            case {"end": int(number), "results": [*values]} if (
                worker.running and number == worker.is_next
            ):
                _, call = worker.calls[0]
                results = read_results(values, len(call.items))
                seconds = time.monotonic() - worker.began_at
                for item, result in zip(call.items, results, strict=True):
                    self._results[item, call.function] = TimedResult(result, seconds)
                worker.calls.popleft()
                worker.running = bool(worker.calls)
                self._set_deadline(worker)
            case {"begin": int(number)} if not worker.running and number == worker.is_next:
                worker.running, self._n_lost = True, 0
                worker.began_at = time.monotonic()
                self._set_deadline(worker)
            case {"signatures": [*values]} if not worker.ready:
                self.signatures = read_signatures(values, len(self._cfg.functions))
                worker.ready = True
            case {"error": str(error)} if not worker.ready:
                raise WorkerFailed(error)
            case _:
                raise ProtocolError(f"unexpected {message!r:.80}")

    def _drop(self, worker: _Worker, error: str) -> None:
        """Ends a worker: its running call fails, the calls after it return to the queue."""
        worker.process.kill()
        self._workers.remove(worker)
        if worker.running:
            _, call = worker.calls.popleft()
            seconds = time.monotonic() - worker.began_at
            for item in call.items:
                failed = RewardResult(0.0, {}, error, {})
                self._results[item, call.function] = TimedResult(failed, seconds)
        elif worker.calls or not worker.ready:
            self._lost(error)
        self._queue.extendleft(call for _, call in reversed(worker.calls))

    def _lost(self, error: str) -> None:
        """Counts a worker that failed before it began a call.

        Raises ChildProcessError after several in a row if no worker is left.
        """
        self._n_lost += 1
        if self._n_lost < MAX_START_FAILURES:
            return
        if not any(worker.ready for worker in self._workers):
            headline, newline, frames = error.partition("\n")
            raise ChildProcessError(
                f"reward workers could not be started {self._n_lost} times in a row ({headline}); "
                "look for changed files and for memory or process limits, then resume the run"
                f"{newline}{frames}"
            )
        self._no_start_before = time.monotonic() + _RETRY_S
