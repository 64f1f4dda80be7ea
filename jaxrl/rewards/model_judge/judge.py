"""The reward `judge`: the score of a response by a rubric, from a language model."""

import asyncio
import functools
import os
import time
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl.json_text import Json, Message
from jaxrl.rewards.calls import RewardFailed
from jaxrl.rewards.model_judge.cache import VerdictCache, content_key
from jaxrl.rewards.model_judge.client import ChatClient, RequestFailed, read_reply
from jaxrl.rewards.model_judge.request import render, request_body
from jaxrl.rewards.model_judge.rubric import Rubric, read_rubric
from jaxrl.rewards.verifiers.ground_truth import as_text

FIRST_WAIT_S = 0.5  # before the second attempt; doubled for each further one
_COUNTS: dict[str, int] = {
    "requests": 0,
    "cached": 0,
    "failures": 0,
    "prompt_tokens": 0,
    "completion_tokens": 0,
}
_MARGIN_S = 5.0  # for reading requests and verdicts
_MAX_SHOWN = 200  # characters of a verdict in an error message


async def judge(
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any],
    conversation: Sequence[Message],
    *,
    url: str,
    model: str,
    rubric: str,
    reference: str = "",
    thinking: bool = False,
    temperature: float = 0.0,
    max_tokens: int = 1024,
    request_s: float = 60.0,
    attempts: int = 3,
    requests: int = 16,
    api_key_env: str = "",
    cache: str = "",
) -> dict[str, Any]:
    """The score from 0 to 1, the verdict by criterion, and counts of requests and tokens.

    The options are the keys of reward.judge; `cache` is a folder or "". Raises RewardFailed if no
    attempt gives a valid verdict.
    """
    criteria = _rubric(rubric)
    episode = extra_info.get("episode")
    response = render(episode["said"]) if episode else solution_str
    body = request_body(
        criteria,
        model=model,
        conversation=conversation,
        response=response if thinking else response.rpartition("</think>")[2],
        reference=_reference(reference, ground_truth, extra_info),
        temperature=temperature,
        max_tokens=max_tokens,
    )
    source = _source(url, api_key_env, request_s, requests, attempts, cache)
    return await source.verdict(criteria, body)


def check_options(*, rubric: str, api_key_env: str = "") -> None:
    """Raises ValueError if the rubric or the API key of a judge cannot be read."""
    read_rubric(rubric)
    _api_key(api_key_env)


def longest_s(attempts: int, request_s: float) -> float:
    """Seconds until a response has a verdict, or no further attempt."""
    return attempts * request_s + FIRST_WAIT_S * (2 ** (attempts - 1) - 1) + _MARGIN_S


class Verdicts:
    """Verdicts of one server. Equal requests are sent once: the others wait for the cache."""

    def __init__(self, client: ChatClient, url: str, attempts: int, cache: VerdictCache | None):
        self._client, self._url, self._attempts, self._cache = client, url, attempts, cache
        self._locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()

    async def verdict(self, rubric: Rubric, body: Json) -> dict[str, Any]:
        """The result of the reward for a request, from the cache or from the server."""
        if self._cache is None:
            return await self._request(rubric, body, "")
        key = content_key(self._url, body)
        lock = self._locks.setdefault(key, asyncio.Lock())
        async with lock:
            if text := self._cache.get(key):
                return _result(rubric, rubric.read_verdict(text), {**_COUNTS, "cached": 1})
            return await self._request(rubric, body, key)

    async def _request(self, rubric: Rubric, body: Json, key: str) -> dict[str, Any]:
        """Asks the server, again after failures. Raises RewardFailed after the last one."""
        counts: Counter[str] = Counter(_COUNTS)
        for attempt in range(self._attempts):
            if attempt:
                await asyncio.sleep(FIRST_WAIT_S * 2 ** (attempt - 1))
            start = time.monotonic()
            counts["requests"] += 1
            try:
                text = await self._ask(body, counts)
                verdict = _read(rubric, text)
            except RequestFailed as error:
                counts[f"failed_{error.kind}"] += 1
                if error.final or attempt == self._attempts - 1:
                    counts["failures"] += 1
                    reason = f"no verdict after {attempt + 1} attempts; {error}"
                    raise RewardFailed(reason, counts) from error
                continue
            if self._cache is not None:
                self._cache.put(key, {"verdict": text, "model": body["model"]})
            return _result(rubric, verdict, counts) | {"latency_s": time.monotonic() - start}
        raise AssertionError("attempts is at least 1")

    async def _ask(self, body: Json, counts: Counter[str]) -> str:
        reply = read_reply(await self._client.send(body))
        counts["prompt_tokens"] += reply.prompt_tokens
        counts["completion_tokens"] += reply.completion_tokens
        return reply.text()


def _read(rubric: Rubric, text: str) -> dict[str, int]:
    try:
        return rubric.read_verdict(text)
    except ValueError as error:
        raise RequestFailed("invalid", f"{error}, in {text!r:.{_MAX_SHOWN}}") from error


def _result(rubric: Rubric, verdict: dict[str, int], counts: Mapping[str, int]) -> dict[str, Any]:
    return verdict | {"score": rubric.score(verdict), "counts": dict(counts)}


def _reference(column: str, ground_truth: Any, extra_info: dict[str, Any]) -> str | None:
    """The reference answer of the row; None without a column for it."""
    if not column:
        return None
    if column == "answer":
        return as_text(ground_truth)
    if column not in extra_info:
        raise ValueError(
            f"the row has no column {column!r}, which reward.judge.reference names; add it, or set "
            "the key to 'answer' or ''"
        )
    return as_text(extra_info[column])


@functools.cache
def _rubric(path: str) -> Rubric:
    return read_rubric(path)


@functools.cache
def _source(
    url: str, api_key_env: str, request_s: float, requests: int, attempts: int, cache: str
) -> Verdicts:
    """The one source of a worker process with these options."""
    client = ChatClient(url, _api_key(api_key_env), timeout_s=request_s, concurrency=requests)
    return Verdicts(client, url, attempts, VerdictCache(Path(cache)) if cache else None)


def _api_key(variable: str) -> str:
    """The API key in an environment variable; "" without a variable."""
    if variable and not os.environ.get(variable):
        raise ValueError(
            f"the environment variable {variable} is not set; set it to the judge's API key, or "
            "set reward.judge.api_key_env=''"
        )
    return os.environ[variable] if variable else ""
