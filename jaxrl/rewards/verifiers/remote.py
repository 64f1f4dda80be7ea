"""Scores from a server, by the HTTP contract of OpenRLHF's --reward.remote_url.

A POST of {"query": [...], "prompts": [...], "labels": [...]}, texts with all special tokens, is answered by
{"rewards": [...]}, and if it likes by "scores" and "extra_logs" {name: [...]} beside, which are logged.
"""

import http.client
import json
import random
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

_MARGIN_S = 1.0  # of the time of a call, for its end
_SHOWN = 200  # characters of an answer in a message
_PASSING = (408, 425, 429)  # HTTP statuses below 500 that may be others a little later


def remote(
    data_sources: Sequence[str],
    solution_strs: Sequence[str],
    ground_truths: Sequence[str],
    extra_infos: Sequence[dict[str, Any]],
    *,
    prompt_strs: Sequence[str],
    query_strs: Sequence[str],
    url: str,
    timeout_s: float,
    attempts: int = 5,
    wait_s: float = 0.5,
) -> list[dict[str, Any]]:
    """What the server at `url` says, or one of several, joined by commas, of which each attempt takes the next.

    A server that cannot be reached, does not answer, or answers with status 5xx or "too many requests" is asked again,
    at most `attempts` times and within `timeout_s`, after `wait_s` seconds, then twice as many, and so on. Raises
    RuntimeError with the last failure, ValueError for an answer that is not the contract's.
    """
    end = time.monotonic() + timeout_s - _MARGIN_S
    body = {"query": query_strs, "prompts": prompt_strs, "labels": ground_truths}
    urls = url.split(",")
    first, failure = random.randrange(len(urls)), "no time for an attempt"
    for attempt in range(attempts):
        here = urls[(first + attempt) % len(urls)]
        left_s = end - time.monotonic()
        if left_s <= 0:
            break
        try:
            return read_scores(post(here, body, timeout_s=left_s), len(query_strs), here)
        except urllib.error.HTTPError as error:
            failure = f"{here} answered with status {error.code} {error.reason}"
            if error.code < 500 and error.code not in _PASSING:
                raise RuntimeError(failure) from error
        except (
            OSError,
            http.client.HTTPException,
        ) as error:  # connection, time-out, half an answer
            failure = f"{here}: {error}"
        pause_s = wait_s * 2**attempt
        time.sleep(max(0.0, min(pause_s, end - time.monotonic())))
    raise RuntimeError(f"no score after {attempts} attempts within {timeout_s:g} s; {failure}")


def post(url: str, body: dict[str, Any], *, timeout_s: float) -> bytes:
    """The server's answer. Raises OSError, of which HTTPError is one."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=timeout_s) as answer:
        return answer.read()


def read_scores(answer: bytes, n: int, url: str) -> list[dict[str, Any]]:
    """The reward of each of `n` queries under "score", and what is to be logged beside it."""
    try:
        found = json.loads(answer)
    except ValueError as error:
        raise ValueError(f"{url} answered with {answer[:_SHOWN]!r}, which is no JSON") from error
    if not isinstance(found, dict) or not isinstance(found.get("rewards"), list):
        shown = list(found) if isinstance(found, dict) else type(found).__name__
        raise ValueError(f"{url} answered without a list of 'rewards' but with {shown}")
    logs = found.get("extra_logs") or {}
    columns = {"scores": found.get("scores")} | logs | {"score": found["rewards"]}
    lists = {name: values for name, values in columns.items() if isinstance(values, list)}
    for name, values in lists.items():
        if len(values) != n:
            shown = "rewards" if name == "score" else name
            raise ValueError(f"{url} answered {n} queries with {len(values)} {shown}")
    return [{name: values[i] for name, values in lists.items()} for i in range(n)]
