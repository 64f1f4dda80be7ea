"""Runs reward functions in worker processes, so that none of them can stop or crash a run.

A worker is a fresh Python process (not a fork: the parent has JAX's threads) without JAX. It leads
a separate session, so Ctrl-C reaches the parent only. It gets several calls at a time and answers
them one by one. If an answer exceeds the time limit, the worker and all its children are killed,
the call becomes an error, its other calls go to the next free worker, and a new process replaces
it.
"""

import collections
import dataclasses
import itertools
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np

from jaxrl.config.keys import RewardConfig
from jaxrl.rewards.functions import (
    TEXT_ARGUMENTS,
    CallSignature,
    check_start,
    metric_names,
    pool_option,
)
from jaxrl.rewards.worker import Result
from jaxrl.types import Episode, Reward, Rollout
from jaxrl.workers.process import START_TIMEOUT_S, start_process

_MAX_START_FAILURES = 3  # in a row
_MAX_BATCH = 64  # calls per message


@dataclasses.dataclass(frozen=True)
class _Call:
    """A call of one function, for one rollout or a batch."""

    items: tuple[int, ...]  # indices of the rollouts
    function: int
    n: int | None  # batch size; None if the function takes one response
    arguments: dict[str, Any]


@dataclasses.dataclass
class _Worker:
    """A process, its unanswered calls, and when the next answer is due."""

    process: subprocess.Popen
    connection: Connection
    deadline: float
    ready: bool = False
    pending: collections.deque[_Call] = dataclasses.field(default_factory=collections.deque)

    def kill(self) -> int:
        """Kills the process and its children; returns its exit status."""
        if self.process.returncode is None:
            self.connection.close()
            os.killpg(self.process.pid, signal.SIGKILL)  # it leads a process group
        return self.process.wait()

    def reap(self) -> int:
        """kill() for a process that closed its socket: waits briefly for its real exit status."""
        deadline = time.monotonic() + 1.0
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        while not os.waitid(os.P_PID, self.process.pid, flags) and time.monotonic() < deadline:
            time.sleep(0.005)
        return self.kill()


class RewardPool:
    """The reward functions of a run. Use as a context manager, or call close().

    The constructor starts the workers and returns once all have imported the functions. It raises
    ValueError for an unknown name, a module that cannot be imported, a wrong number of weights, or
    a reward that cannot run on this machine.
    `decode` turns tokens into text with special tokens, for functions that declare TEXT_ARGUMENTS.
    Not thread-safe.
    """

    def __init__(self, cfg: RewardConfig, decode: Callable[[np.ndarray], str] | None = None):
        self.names = metric_names(cfg.functions)
        self._weights = cfg.weights or (1.0,) * len(self.names)
        if len(self._weights) != len(self.names):
            raise ValueError(
                f"{len(cfg.functions)} reward functions and {len(cfg.weights)} weights; set "
                "reward.weights to one number per function, or to () for 1.0 each"
            )
        for function in cfg.functions:
            check_start(function)
        self._cfg = cfg
        self._decode = decode
        self._limits_s = [pool_option(f, "timeout_s") or cfg.timeout_s for f in cfg.functions]
        self._batch_sizes = [int(pool_option(f, "batch_size")) for f in cfg.functions]
        self._signatures: list[CallSignature] = []  # reported by the workers
        self._start_failures = 0
        self._workers: list[_Worker] = []
        try:
            self._start_missing()
            while not all(worker.ready for worker in self._workers):
                self._wait()
                for worker in self._workers:
                    if error := self._start_error(worker):
                        raise ValueError(error)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Kills all workers and waits for them."""
        while self._workers:
            self._workers.pop().kill()

    def score(self, rollouts: Sequence[Rollout]) -> list[Reward]:
        """One reward per rollout, in order.

        The value is the weighted sum of the functions. `parts` has the score of each function by
        name, and its further numbers as "name/key". If a function raises, hangs, kills its process
        or does not return a finite number, the value is cfg.error_value and `error` has the reason.

        Functions get verl's arguments. extra_info has the prompt's `extra`, "finish" (as in
        Rollout), "response_len" (tokens) and, with an environment, "episode".
        """
        calls = collections.deque(self._calls(rollouts))
        try:
            results = self._run(calls)
        except BaseException:  # Ctrl-C: running calls must not answer a later score()
            self.close()
            raise
        return [
            self._combine([results[item, f] for f in range(len(self.names))])
            for item in range(len(rollouts))
        ]

    def _calls(self, rollouts: Sequence[Rollout]) -> list[_Call]:
        """All calls of all functions; batches come first because they take longest."""
        calls = []
        for function, signature in enumerate(self._signatures):
            per_worker = -(-len(rollouts) // self._cfg.workers)
            size = max(1, min(self._batch_sizes[function], per_worker)) if signature.batched else 1
            for items in itertools.batched(range(len(rollouts)), size):
                found = [self._arguments(rollouts[item], signature) for item in items]
                n: int | None = None
                arguments: dict[str, Any] = found[0]
                if signature.batched:
                    n = len(items)
                    arguments = {f"{name}s": [one[name] for one in found] for name in found[0]}
                if "timeout_s" in signature.optional:
                    arguments["timeout_s"] = self._limits_s[function]
                calls.append(_Call(items, function, n, arguments))
        return sorted(calls, key=lambda call: call.n is None)

    def _arguments(self, rollout: Rollout, signature: CallSignature) -> dict[str, Any]:
        """verl's arguments, and the texts that the function declares."""
        prompt = rollout.prompt
        extra = {"finish": rollout.finish, "response_len": len(rollout.tokens)}
        if rollout.episode is not None:
            extra["episode"] = _episode_info(rollout.episode)
        arguments: dict[str, Any] = {
            "data_source": prompt.source,
            "solution_str": rollout.text,
            "ground_truth": prompt.answer,
            "extra_info": prompt.extra | extra,
        }
        if texts := [name for name in TEXT_ARGUMENTS if name in signature.optional]:
            assert self._decode is not None, f"{texts} need a tokenizer"
            query = np.concatenate([prompt.tokens, rollout.tokens])
            known = {"prompt_str": prompt.tokens, "query_str": query}
            arguments |= {name: self._decode(known[name]) for name in texts}
        return arguments

    def _run(self, queue: collections.deque[_Call]) -> dict[tuple[int, int], Result]:
        results: dict[tuple[int, int], Result] = {}
        n_results = sum(len(call.items) for call in queue)
        n_calls = max(1, min(_MAX_BATCH, len(queue) // (4 * self._cfg.workers)))
        while len(results) < n_results:
            self._start_missing()
            for worker in self._workers:
                if worker.ready and not worker.pending and queue:
                    self._send(worker, n_calls, queue)
            self._wait()
            for worker in tuple(self._workers):
                error = (
                    self._collect(worker, results) if worker.ready else self._start_error(worker)
                )
                if error:
                    self._replace(worker, error, queue, results)
        return results

    def _start_missing(self) -> None:
        while len(self._workers) < (self._cfg.workers if self.names else 0):
            self._workers.append(_start(self._cfg, self._limits_s))

    def _wait(self) -> None:
        """Blocks until a worker has sent something or is late."""
        due = min(w.deadline for w in self._workers if w.pending or not w.ready)
        wait([w.connection for w in self._workers], timeout=max(0.0, due - time.monotonic()))

    def _start_error(self, worker: _Worker) -> str:
        """Reads the report of a starting worker; "" if it is ready or still starting."""
        if not worker.connection.poll():
            late = time.monotonic() > worker.deadline
            error = (
                f"importing the reward functions took over {START_TIMEOUT_S:g} s; do less at import"
            )
            return error if late else ""
        try:
            report = worker.connection.recv()
        except (EOFError, OSError):
            status = worker.reap()
            return (
                f"a reward worker died at startup with status {status}; check the function's module"
            )
        if isinstance(report, str):
            return report
        worker.ready, self._signatures, self._start_failures = True, report, 0
        return ""

    def _send(self, worker: _Worker, n_calls: int, queue: collections.deque[_Call]) -> None:
        if queue[0].n is not None:
            n_calls = 1  # one batch per worker
        calls = [queue.popleft() for _ in range(min(n_calls, len(queue)))]
        try:
            worker.connection.send([(call.function, call.n, call.arguments) for call in calls])
        except OSError:  # it died while idle; _collect reports it
            queue.extendleft(reversed(calls))
            return
        worker.pending.extend(calls)
        self._set_deadline(worker)

    def _set_deadline(self, worker: _Worker) -> None:
        """Sets the deadline of the first pending call."""
        if worker.pending:
            worker.deadline = time.monotonic() + self._limits_s[worker.pending[0].function]

    def _collect(self, worker: _Worker, results: dict[tuple[int, int], Result]) -> str:
        """Receives available answers; returns why the worker must be replaced, or ""."""
        try:
            while worker.connection.poll():
                found = worker.connection.recv()
                call = worker.pending.popleft()
                for item, result in zip(call.items, found, strict=True):
                    results[item, call.function] = Result(*result)
                self._set_deadline(worker)
        except (EOFError, OSError):
            return f"the worker process died with status {worker.reap()}"
        if worker.pending and time.monotonic() > worker.deadline:
            limit_s = self._limits_s[worker.pending[0].function]
            return f"no answer within {limit_s:g} s (reward.timeout_s or the option timeout_s)"
        return ""

    def _replace(
        self,
        worker: _Worker,
        error: str,
        queue: collections.deque[_Call],
        results: dict[tuple[int, int], Result],
    ) -> None:
        """Replaces a worker: the running call fails, the calls after it return to the queue."""
        worker.kill()
        self._workers.remove(worker)
        if not worker.ready:
            self._start_failures += 1
            if self._start_failures >= _MAX_START_FAILURES:
                raise RuntimeError(
                    f"reward workers could not be started {_MAX_START_FAILURES} times in a row "
                    f"({error}); look for changed files and for memory or process limits"
                )
        elif worker.pending:
            call = worker.pending.popleft()
            results |= {(item, call.function): Result(0.0, {}, error) for item in call.items}
            queue.extendleft(reversed(worker.pending))

    def _combine(self, results: list[Result]) -> Reward:
        """The reward from the results of all functions for one rollout."""
        parts: dict[str, float] = {}
        errors: list[str] = []
        for name, result in zip(self.names, results, strict=True):
            if result.error:
                errors.append(f"{name}: {result.error}")
                continue
            parts[name] = result.score
            parts |= {f"{name}/{key}": value for key, value in result.parts.items()}
        reward = self._cfg.error_value
        if not errors:
            reward = sum(w * r.score for w, r in zip(self._weights, results, strict=True))
        return Reward(float(reward), parts, "; ".join(errors))


def _episode_info(episode: Episode) -> dict[str, Any]:
    """What reward functions get as extra_info["episode"]; the keys are a public interface."""
    return {
        "asked": episode.prompt_messages,
        "said": episode.completion_messages,
        "n_turns": episode.n_turns,
        "reward": episode.reward,
        "counts": episode.counts,
        "error": episode.error,
    }


def _start(cfg: RewardConfig, limits_s: Sequence[float]) -> _Worker:
    ours, process = start_process("jaxrl.rewards.worker")
    ours.send((cfg.functions, limits_s))
    return _Worker(process, ours, deadline=time.monotonic() + START_TIMEOUT_S)
