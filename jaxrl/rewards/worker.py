"""The worker process that runs reward functions: python -m jaxrl.rewards.worker FD.

It imports neither JAX nor the training program, answers each call on the socket FD, and may be
killed at any time. Whatever a function does, at worst this process ends.
"""

import asyncio
import contextlib
import dataclasses
import functools
import inspect
import math
import os
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, SupportsFloat

from jaxrl.config.user_code import error_text
from jaxrl.rewards.calls import (
    CallSettings,
    CallSignature,
    RewardFailed,
    RewardFunction,
    RewardResult,
    check_score,
    late,
    read_signature,
)
from jaxrl.rewards.functions import load_reward
from jaxrl.subprocesses.channel import WorkerChannel
from jaxrl.subprocesses.descendants import adopt_orphans, end_descendants, reap_orphans
from jaxrl.subprocesses.process import connect, time_limit


@dataclasses.dataclass(frozen=True)
class LoadedReward:
    """A reward function and how to call it."""

    function: RewardFunction
    signature: CallSignature
    settings: CallSettings


def main(fd: int) -> None:
    """Answers calls until the parent closes the socket, then ends what the functions started."""
    channel = connect(fd)
    adopt_orphans()
    try:
        answer_calls(channel, load_reward, limited_call)
    finally:
        end_descendants(os.getpid())


@contextlib.contextmanager
def limited_call(limit_s: float) -> Iterator[None]:
    """A call that ends this process if it takes longer; takes the statuses of orphans after it."""
    with time_limit(limit_s):
        yield
    reap_orphans()


def answer_calls(
    channel: WorkerChannel,
    find: Callable[[str], RewardFunction],
    around_call: Callable[[float], contextlib.AbstractContextManager[None]],
) -> None:
    """Finds the functions, reports their signatures or the error, then answers calls.

    Every call runs within `around_call(its time limit in seconds)`. Returns when the trainer closes
    the socket. rewards/calls.py has the messages.
    """
    try:
        specs, settings = channel.receive()
        try:
            rewards = [load(spec, s, find) for spec, s in zip(specs, settings, strict=True)]
        except BaseException as error:
            text = str(error) if isinstance(error, ValueError) else error_text(error)
            channel.send({"error": text})
            return
        channel.send({"signatures": [reward.signature for reward in rewards]})
        with asyncio.Runner() as loop:  # one for all calls: clients of user code belong to a loop
            while True:
                calls = channel.receive()
                channel.send({"begin": calls[0][0]})
                for number, index, n, arguments, limit_s in calls:
                    with around_call(limit_s):
                        results = call(rewards[index], arguments, n, loop)
                    answer(channel, number, results)
    except (EOFError, OSError):  # the parent closed the socket or is gone
        return


def load(spec: str, settings: CallSettings, find: Callable[[str], RewardFunction]) -> LoadedReward:
    """Finds a function. Raises ValueError if that fails or it cannot be called as a reward."""
    function = find(spec)
    if settings.options:
        function = functools.partial(function, **settings.options)
    try:
        signature = read_signature(function)
    except ValueError as error:
        raise ValueError(f"reward.functions {spec!r}: {error}") from error
    return LoadedReward(function, signature, settings)


def answer(channel: WorkerChannel, number: int, results: Sequence[RewardResult]) -> None:
    """Sends the results of a call; an error for each if together they are too long."""
    try:
        channel.send({"end": number, "results": results})
    except ValueError as error:
        channel.send({"end": number, "results": [_failed(error)] * len(results)})


def call(
    reward: LoadedReward, arguments: dict[str, Any], n: int | None, loop: asyncio.Runner
) -> list[RewardResult]:
    """Results of a call for a batch of `n` responses, or for one response if `n` is None.

    Exceptions and scores that are not finite numbers become errors.
    """
    batched = reward.signature.batched
    if n is not None and not batched:
        each = [{name: values[i] for name, values in arguments.items()} for i in range(n)]
        return loop.run(_call_each(reward, each))
    try:
        value = reward.function(**arguments)
        if inspect.isawaitable(value):
            value = loop.run(_finish(value))
        values = _batch_values(value, n) if n is not None else [value]
    except BaseException as error:  # the user's code may raise anything, SystemExit too
        return [_failed(error)] * (n or 1)
    return [_checked(value, reward.signature) for value in values]


async def _call_each(reward: LoadedReward, each: list[dict[str, Any]]) -> list[RewardResult]:
    """Calls an async function for every response, `concurrency` of them at a time."""
    free = asyncio.Semaphore(reward.settings.concurrency)

    async def call_one(arguments: dict[str, Any]) -> RewardResult:
        async with free:
            limit_s = reward.settings.limit_s
            limit = asyncio.timeout(limit_s)
            try:
                async with limit:
                    return _checked(await reward.function(**arguments), reward.signature)
            except BaseException as error:  # SystemExit would end the loop
                is_late = limit.expired()
                return RewardResult(0.0, {}, late(limit_s), {}) if is_late else _failed(error)

    return await asyncio.gather(*map(call_one, each))


async def _finish(value: Awaitable[Any]) -> Any:
    """Awaits a value. Exceptions that are not errors would end the loop, so they become errors."""
    try:
        return await value
    except (SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError(error_text(error)) from error


def _batch_values(values: Any, n: int) -> list[Any]:
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise TypeError(f"the function returned {type(values).__name__} for a batch; return a list")
    if len(values) != n:
        raise ValueError(
            f"the function returned {len(values)} scores for a batch of {n} responses; return one "
            "score per response"
        )
    return list(values)


def _checked(value: Any, signature: CallSignature) -> RewardResult:
    if value is None and signature.form == "trl":  # as in TRL: no score for this response
        return RewardResult(None, {}, "", {})
    if isinstance(value, RewardFailed):
        return _failed(value)
    try:
        return _result(value)
    except Exception as error:  # float() of the user's object may raise anything
        return _failed(error)


def _result(value: Any) -> RewardResult:
    parts = dict(value) if isinstance(value, dict) else {"score": value}
    if "score" not in parts:
        raise TypeError(
            f"the function returned a dict with the keys {list(parts)}; add the key 'score'"
        )
    counts, feedback = parts.pop("counts", {}), parts.pop("feedback", "")
    numbers = _numbers(parts)
    if "score" not in numbers:
        raise TypeError(f"the function returned {value!r}; return a number or a dict with 'score'")
    score = numbers.pop("score")
    check_score(score, "the function")
    return RewardResult(score, _finite(numbers), "", _counts(counts), _feedback(feedback))


def _feedback(text: Any) -> str:
    """The text that UTF-8 can express; "" if it is none."""
    return text.encode(errors="replace").decode() if isinstance(text, str) else ""


def _numbers(values: Mapping[Any, Any]) -> dict[str, float]:
    return {str(k): _float(v) for k, v in values.items() if isinstance(v, SupportsFloat)}


def _finite(numbers: Mapping[str, float]) -> dict[str, float]:
    return {k: v for k, v in numbers.items() if math.isfinite(v)}


def _counts(values: Any) -> dict[str, float]:
    return _finite(_numbers(values)) if isinstance(values, Mapping) else {}


def _float(value: SupportsFloat) -> float:
    """The value as a float; infinity if it is an integer that no float can hold."""
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _failed(error: BaseException) -> RewardResult:
    counts = _counts(error.counts) if isinstance(error, RewardFailed) else {}
    return RewardResult(0.0, {}, error_text(error), counts)


if __name__ == "__main__":
    main(int(sys.argv[1]))
