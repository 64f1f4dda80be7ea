"""The worker process that runs reward functions: python -m jaxrl.rewards.worker FD.

It imports neither JAX nor the training program, answers each call on the socket FD, and may be
killed at any time. Whatever a function does, at worst this process ends.
"""

import asyncio
import dataclasses
import inspect
import math
import os
import sys
from collections.abc import Awaitable, Sequence
from typing import Any, SupportsFloat

from jaxrl.config.user_code import error_text
from jaxrl.rewards.calls import (
    CallSignature,
    RewardFunction,
    RewardResult,
    check_score,
    late,
    read_signature,
)
from jaxrl.rewards.functions import load_reward, pool_option
from jaxrl.subprocesses.channel import WorkerChannel
from jaxrl.subprocesses.descendants import adopt_orphans, end_descendants, reap_orphans
from jaxrl.subprocesses.process import connect, time_limit


@dataclasses.dataclass(frozen=True)
class LoadedReward:
    """A reward function and how to call it."""

    function: RewardFunction
    signature: CallSignature
    limit_s: float  # of a call; of one response for an async function without batches
    concurrency: int  # awaits in flight, for an async function without batches


def main(fd: int) -> None:
    """Loads the functions, reports their signatures or the error, then answers calls.

    Returns when the parent closes the socket. rewards/calls.py has the messages.
    """
    channel = connect(fd)
    adopt_orphans()
    try:
        specs, limits_s = channel.receive()
        try:
            rewards = [load(spec, limit) for spec, limit in zip(specs, limits_s, strict=True)]
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
                    with time_limit(limit_s):
                        results = call(rewards[index], arguments, n, loop)
                    answer(channel, number, results)
                reap_orphans()
    except (EOFError, OSError):  # the parent closed the socket or is gone
        return
    finally:
        end_descendants(os.getpid())


def load(spec: str, limit_s: float) -> LoadedReward:
    """Imports a function. Raises ValueError if that fails or it cannot be called as a reward."""
    function = load_reward(spec)
    try:
        signature = read_signature(function)
    except ValueError as error:
        raise ValueError(f"reward.functions {spec!r}: {error}") from error
    return LoadedReward(function, signature, limit_s, int(pool_option(spec, "concurrency")))


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
    free = asyncio.Semaphore(reward.concurrency)

    async def call_one(arguments: dict[str, Any]) -> RewardResult:
        async with free:
            limit = asyncio.timeout(reward.limit_s)
            try:
                async with limit:
                    return _checked(await reward.function(**arguments), reward.signature)
            except BaseException as error:  # SystemExit would end the loop
                return (
                    RewardResult(0.0, {}, late(reward.limit_s))
                    if limit.expired()
                    else _failed(error)
                )

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
        return RewardResult(None, {}, "")
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
    numbers = {str(k): _float(v) for k, v in parts.items() if isinstance(v, SupportsFloat)}
    if "score" not in numbers:
        raise TypeError(f"the function returned {value!r}; return a number or a dict with 'score'")
    score = numbers.pop("score")
    check_score(score, "the function")
    return RewardResult(score, {k: v for k, v in numbers.items() if math.isfinite(v)}, "")


def _float(value: SupportsFloat) -> float:
    """The value as a float; infinity if it is an integer that no float can hold."""
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _failed(error: BaseException) -> RewardResult:
    return RewardResult(0.0, {}, error_text(error))


if __name__ == "__main__":
    main(int(sys.argv[1]))
