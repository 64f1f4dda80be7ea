"""The process that runs reward functions: python -m jaxrl.rewards.worker FD.

It imports neither JAX nor the training program, answers every call on the socket FD, and may be killed
at any moment: whatever a function does, at worst this process ends.
"""

import math
import signal
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, SupportsFloat

from jaxrl.workers.functions import RewardFunction, how_to_call, load_function

_GRACE_S = 5.0  # the parent's time limit comes first; this one ends a worker that lost its parent
_MAX_ERROR = 500  # characters


class Result(NamedTuple):
    """What a function gave for one response: a finite score, or the reason why there is none."""

    score: float
    parts: dict[str, float]  # further numbers that the function returned
    error: str


def main(fd: int) -> None:
    """Loads the functions, reports how to call them or the error, then answers calls until the socket closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(fd)
    try:
        specs, limits_s = connection.recv()
        try:
            functions = [load_function(spec) for spec in specs]
        except BaseException as error:
            connection.send(str(error) or type(error).__name__)
            return
        connection.send([how_to_call(function) for function in functions])
        while True:
            for index, n, arguments in connection.recv():
                # SIGALRM's default action ends the process even inside C code
                signal.setitimer(signal.ITIMER_REAL, limits_s[index] + _GRACE_S)
                results = call(functions[index], arguments, n)
                signal.setitimer(signal.ITIMER_REAL, 0)
                connection.send([tuple(result) for result in results])
    except (EOFError, OSError):  # the parent closed the socket or is gone
        return


def call(function: RewardFunction, arguments: dict[str, Any], n: int | None) -> list[Result]:
    """The results of a call for `n` responses, None for one; what is no finite number becomes an error."""
    try:
        value = function(**arguments)
        values = [value] if n is None else _as_many(value, n)
    except BaseException as error:  # the user's code may raise anything, SystemExit too
        return [_failed(error)] * (n or 1)
    return [_checked(value) for value in values]


def _as_many(values: Any, n: int) -> list[Any]:
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise TypeError(f"the function returned {type(values).__name__} for a batch; return a list")
    if len(values) != n:
        raise ValueError(f"the function returned {len(values)} scores for a batch of {n} responses")
    return list(values)


def _checked(value: Any) -> Result:
    try:
        return _result(value)
    except Exception as error:  # float() of the user's object may raise anything
        return _failed(error)


def _result(value: Any) -> Result:
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


def _failed(error: BaseException) -> Result:
    return Result(0.0, {}, f"{type(error).__name__}: {error}"[:_MAX_ERROR])


if __name__ == "__main__":
    main(int(sys.argv[1]))
