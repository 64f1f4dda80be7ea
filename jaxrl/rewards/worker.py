"""The worker process that runs reward functions: python -m jaxrl.rewards.worker FD.

It imports neither JAX nor the training program, answers each call on the socket FD, and may be
killed at any time. Whatever a function does, at worst this process ends.
"""

import math
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple, SupportsFloat

from jaxrl.rewards.functions import RewardFunction, call_signature, load_reward
from jaxrl.workers.process import connect, error_text, time_limit


class Result(NamedTuple):
    """The result of a function for one response: a finite score, or an error."""

    score: float
    parts: dict[str, float]  # further numbers that the function returned
    error: str  # why there is no score; "" if there is one


def main(fd: int) -> None:
    """Loads the functions, reports their signatures or the error, then answers calls.

    Returns when the parent closes the socket.
    """
    connection = connect(fd)
    try:
        specs, limits_s = connection.recv()
        try:
            functions = [load_reward(spec) for spec in specs]
        except BaseException as error:
            connection.send(str(error) or type(error).__name__)
            return
        connection.send([call_signature(function) for function in functions])
        while True:
            for index, n, arguments in connection.recv():
                with time_limit(limits_s[index]):
                    results = call(functions[index], arguments, n)
                connection.send([tuple(result) for result in results])
    except (EOFError, OSError):  # the parent closed the socket or is gone
        return


def call(function: RewardFunction, arguments: dict[str, Any], n: int | None) -> list[Result]:
    """Results of a call for a batch of `n` responses, or for one response if `n` is None.

    Exceptions and scores that are not finite numbers become errors.
    """
    try:
        value = function(**arguments)
        values = [value] if n is None else _batch_values(value, n)
    except BaseException as error:  # the user's code may raise anything, SystemExit too
        return [_failed(error)] * (n or 1)
    return [_checked(value) for value in values]


def _batch_values(values: Any, n: int) -> list[Any]:
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise TypeError(f"the function returned {type(values).__name__} for a batch; return a list")
    if len(values) != n:
        raise ValueError(
            f"the function returned {len(values)} scores for a batch of {n} responses; return one "
            "score per response"
        )
    return list(values)


def _checked(value: Any) -> Result:
    try:
        return _result(value)
    except Exception as error:  # float() of the user's object may raise anything
        return _failed(error)


def _result(value: Any) -> Result:
    parts = dict(value) if isinstance(value, dict) else {"score": value}
    if "score" not in parts:
        raise TypeError(
            f"the function returned a dict with the keys {list(parts)}; add the key 'score'"
        )
    numbers = {str(k): float(v) for k, v in parts.items() if isinstance(v, SupportsFloat)}
    if "score" not in numbers:
        raise TypeError(f"the function returned {value!r}; return a number or a dict with 'score'")
    score = numbers.pop("score")
    if not math.isfinite(score):
        raise ValueError(f"the function returned {score}; return a finite number")
    return Result(score, {k: v for k, v in numbers.items() if math.isfinite(v)}, "")


def _failed(error: BaseException) -> Result:
    return Result(0.0, {}, error_text(error))


if __name__ == "__main__":
    main(int(sys.argv[1]))
