"""The worker process that runs reward functions: python -m jaxrl.rewards.worker FD.

It imports neither JAX nor the training program, answers each call on the socket FD, and may be
killed at any time. Whatever a function does, at worst this process ends.
"""

import math
import sys
from collections.abc import Sequence
from typing import Any, SupportsFloat

from jaxrl.rewards.functions import RewardFunction, call_signature, load_reward
from jaxrl.rewards.messages import Result
from jaxrl.workers.channel import WorkerChannel
from jaxrl.workers.process import connect, error_text, time_limit


def main(fd: int) -> None:
    """Loads the functions, reports their signatures or the error, then answers calls.

    Returns when the parent closes the socket. rewards/messages.py has the messages.
    """
    channel = connect(fd)
    try:
        specs, limits_s = channel.receive()
        try:
            functions = [load_reward(spec) for spec in specs]
        except BaseException as error:
            channel.send({"error": str(error) or type(error).__name__})
            return
        channel.send({"signatures": [call_signature(function) for function in functions]})
        while True:
            calls = channel.receive()
            channel.send({"begin": calls[0][0]})
            for number, index, n, arguments in calls:
                with time_limit(limits_s[index]):
                    results = call(functions[index], arguments, n)
                answer(channel, number, results)
    except (EOFError, OSError):  # the parent closed the socket or is gone
        return


def answer(channel: WorkerChannel, number: int, results: Sequence[Result]) -> None:
    """Sends the results of a call; an error for each if together they are too long."""
    try:
        channel.send({"end": number, "results": results})
    except ValueError as error:
        channel.send({"end": number, "results": [_failed(error)] * len(results)})


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
