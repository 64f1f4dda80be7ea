"""The process that runs reward functions: python -m jaxrl.rewards.worker FD.

It imports neither JAX nor the training program, answers every call on the socket FD, and may be killed
at any moment: whatever a function does, at worst this process ends.
"""

import math
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, SupportsFloat

from jaxrl.rewards.functions import RewardFunction, load_function

_GRACE_S = 5.0  # the parent's time limit comes first; this one ends a worker that lost its parent
_MAX_ERROR = 500  # characters


class Result(NamedTuple):
    """What one call gave: a finite score, or the reason why there is none."""

    score: float
    parts: dict[str, float]  # further numbers that the function returned
    error: str


def main(fd: int) -> None:
    """Loads the functions, reports "ready" or the error, then answers calls until the socket closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(fd)
    try:
        specs, timeout_s = connection.recv()
        try:
            functions = [load_function(spec) for spec in specs]
        except BaseException as error:
            connection.send(str(error) or type(error).__name__)
            return
        connection.send("ready")
        while True:
            for index, arguments in connection.recv():
                # SIGALRM's default action ends the process even inside C code
                signal.setitimer(signal.ITIMER_REAL, timeout_s + _GRACE_S)
                result = call(functions[index], arguments)
                signal.setitimer(signal.ITIMER_REAL, 0)
                connection.send(tuple(result))
    except (EOFError, OSError):  # the parent closed the socket or is gone
        return


def call(function: RewardFunction, arguments: dict[str, Any]) -> Result:
    """Calls with verl's keyword arguments; everything that is no finite number becomes an error."""
    try:
        return _checked(function(**arguments))
    except BaseException as error:  # the user's code may raise anything, SystemExit too
        return Result(0.0, {}, f"{type(error).__name__}: {error}"[:_MAX_ERROR])


def _checked(value: Any) -> Result:
    parts = dict(value) if isinstance(value, dict) else {"score": value}
    if "score" not in parts:
        raise TypeError(f"the function returned a dict without 'score' but with {list(parts)}")
    numbers = {str(k): float(v) for k, v in parts.items() if isinstance(v, SupportsFloat)}
    if "score" not in numbers:
        raise TypeError(f"the function returned {value!r}; return a number or a dict with 'score'")
    score = numbers.pop("score")
    if not math.isfinite(score):
        raise ValueError(f"the function returned {score}")
    return Result(score, {k: v for k, v in numbers.items() if math.isfinite(v)}, "")


if __name__ == "__main__":
    main(int(sys.argv[1]))
