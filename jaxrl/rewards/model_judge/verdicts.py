"""Verdicts of a judge's server: requests with retries, a cache by content, counts and cost."""

import asyncio
import dataclasses
import functools
import os
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from jaxrl.http.client import FIRST_WAIT_S, RequestFailed
from jaxrl.http.reply_cache import content_key
from jaxrl.json_text import Json
from jaxrl.rewards.calls import RewardFailed
from jaxrl.rewards.model_judge.cache import VerdictCache
from jaxrl.rewards.model_judge.client import ChatClient, read_reply
from jaxrl.rewards.model_judge.rubric import Rubric, read_rubric

COUNTS: dict[str, float] = {
    "requests": 0.0,
    "cached": 0.0,
    "failures": 0.0,
    "prompt_tokens": 0.0,
    "completion_tokens": 0.0,
    "cost": 0.0,
}
_MARGIN_S = 5.0  # for reading requests and verdicts
_MAX_SHOWN = 200  # characters of a verdict in an error message


@dataclasses.dataclass(frozen=True)
class Verdict[T]:
    """The answer of a judge, with the requests and tokens that it took."""

    value: T
    counts: Mapping[str, float]
    latency_s: float | None  # of the request that gave it; None from the cache


@dataclasses.dataclass(frozen=True)
class JudgeServer:
    """A judge's server, and how its requests are sent; the keys of reward.judge."""

    url: str
    model: str
    api_key_env: str
    request_s: float
    requests: int
    attempts: int
    cache: str  # folder; "" = none
    cache_name: str  # of the server in the cache; "" = url
    prompt_price: float  # of a million tokens
    completion_price: float


class Verdicts:
    """Verdicts of one server. Equal requests are sent once: the others wait for the cache."""

    def __init__(self, server: JudgeServer):
        self._server = server
        self._client = ChatClient(
            server.url,
            api_key(server.api_key_env),
            timeout_s=server.request_s,
            concurrency=server.requests,
        )
        self._cache = VerdictCache(Path(server.cache)) if server.cache else None
        self._locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()

    async def verdict[T](self, body: Json, read: Callable[[str], T]) -> Verdict[T]:
        """The verdict of a request, from the cache or from the server.

        `read` makes it of the text, and raises ValueError for one that is none. Raises RewardFailed
        after the last attempt.
        """
        if self._cache is None:
            return await self._request(body, read, "")
        key = content_key(self._server.cache_name or self._server.url, body)
        lock = self._locks.setdefault(key, asyncio.Lock())
        async with lock:
            if text := self._cache.get(key):
                return Verdict(read(text), {**COUNTS, "cached": 1.0}, None)
            return await self._request(body, read, key)

    async def _request[T](self, body: Json, read: Callable[[str], T], key: str) -> Verdict[T]:
        """Asks the server, again after failures. Raises RewardFailed after the last one."""
        counts: Counter[str] = Counter()
        for attempt in range(self._server.attempts):
            if attempt:
                await asyncio.sleep(FIRST_WAIT_S * 2 ** (attempt - 1))
            start = time.monotonic()
            counts["requests"] += 1
            try:
                text = await self._ask(body, counts)
                value = _read(read, text)
            except RequestFailed as error:
                counts[f"failed_{error.kind}"] += 1
                if error.final or attempt == self._server.attempts - 1:
                    counts["failures"] += 1
                    reason = f"no verdict after {attempt + 1} attempts; {error.kind}: {error}"
                    raise RewardFailed(reason, self._with_cost(counts)) from error
                continue
            if self._cache is not None:
                self._cache.put(key, {"verdict": text, "model": self._server.model})
            return Verdict(value, self._with_cost(counts), time.monotonic() - start)
        raise AssertionError("attempts is at least 1")

    async def _ask(self, body: Json, counts: Counter[str]) -> str:
        reply = read_reply(await self._client.send(body))
        counts["prompt_tokens"] += reply.prompt_tokens
        counts["completion_tokens"] += reply.completion_tokens
        return reply.text()

    def _with_cost(self, counts: Counter[str]) -> dict[str, float]:
        """The counts with the price of their tokens."""
        server = self._server
        cost = (
            counts["prompt_tokens"] * server.prompt_price
            + counts["completion_tokens"] * server.completion_price
        )
        found = {name: float(n) for name, n in counts.items()}
        return COUNTS | found | {"cost": cost / 1e6}


def longest_s(attempts: int, request_s: float) -> float:
    """Seconds until a response has a verdict, or no further attempt."""
    return attempts * request_s + FIRST_WAIT_S * (2 ** (attempts - 1) - 1) + _MARGIN_S


def api_key(variable: str) -> str:
    """The API key in an environment variable; "" without a variable."""
    if variable and not os.environ.get(variable):
        raise ValueError(
            f"the environment variable {variable} is not set; set it to the judge's API key, or "
            "set reward.judge.api_key_env=''"
        )
    return os.environ[variable] if variable else ""


@functools.cache
def verdicts_of(server: JudgeServer) -> Verdicts:
    """The one source of a worker process with these options."""
    return Verdicts(server)


@functools.cache
def cached_rubric(path: str) -> Rubric:
    """The rubric of a file, which a worker process reads once."""
    return read_rubric(path)


def _read[T](read: Callable[[str], T], text: str) -> T:
    try:
        return read(text)
    except ValueError as error:
        raise RequestFailed("invalid", f"{error}, in {text!r:.{_MAX_SHOWN}}") from error
