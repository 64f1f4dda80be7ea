"""Threads that run reward functions of the program that called the trainer, such as a notebook."""

import contextlib
import hashlib
import inspect
import socket
import threading
from collections.abc import Mapping
from typing import Any

from jaxrl.rewards.calls import RewardFunction
from jaxrl.rewards.functions import OWN_PREFIX
from jaxrl.rewards.worker import answer_calls
from jaxrl.subprocesses.channel import Channel, WorkerChannel
from jaxrl.subprocesses.process import WorkerFailed

# Name in reward.functions -> function, of the functions that are objects of this process.
OwnFunctions = Mapping[str, RewardFunction]


class WorkerThread:
    """A thread of this process with the interface of `WorkerProcess`.

    It runs the loop of a worker process, with the caller's own functions. No one can stop a thread:
    a call that exceeds its time limit is an error, and its thread ends when the call returns.
    """

    def __init__(self, functions: OwnFunctions, name: str):
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours)
        self._thread = threading.Thread(
            target=_run, args=(theirs, functions), name=name, daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError as error:  # no further thread
            theirs.close()
            self.channel.close()
            raise WorkerFailed(f"the thread cannot be started: {error}") from error

    @property
    def ended(self) -> bool:
        """Whether the thread has ended."""
        return not self._thread.is_alive()

    def kill(self) -> int:
        """Closes the socket, at which the thread ends after its call; returns 0."""
        self.channel.close()
        return 0

    def reap(self) -> int:
        """As `kill`."""
        return self.kill()


def _run(sock: socket.socket, functions: OwnFunctions) -> None:
    with sock:
        answer_calls(
            WorkerChannel(sock), functions.__getitem__, lambda limit_s: contextlib.nullcontext()
        )


def named(functions: Any) -> OwnFunctions:
    """The functions, or the one function, by the names that reward.functions has for them.

    A name is "notebook:FUNCTION?source=DIGEST". The digest is of the function's source text, so
    that a run resumes with the same function only; it is left out if Python has no source. Raises
    ValueError for an object without a name, and for two functions of one name.
    """
    found: dict[str, RewardFunction] = {}
    for function in functions if isinstance(functions, list | tuple) else (functions,):
        name = getattr(function, "__name__", "")
        if not callable(function) or not name.isidentifier():
            raise ValueError(
                f"reward={function!r} is no function with a name; define it with `def`, so that a "
                "resumed run can compare it, or set reward.functions to 'file.py:NAME'"
            )
        spec = f"{OWN_PREFIX}{name}{_source_option(function)}"
        if spec in found:
            raise ValueError(f"reward has two functions {name}; give them different names")
        found[spec] = function
    if not found:
        raise ValueError("reward=() has no function; leave it out to use config.reward.functions")
    return found


def _source_option(function: RewardFunction) -> str:
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError):
        return ""
    return f"?source={hashlib.sha256(source.encode()).hexdigest()[:8]}"
