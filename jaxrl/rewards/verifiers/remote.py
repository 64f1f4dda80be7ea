"""Scores from a server, with the HTTP interface of OpenRLHF's --reward.remote_url.

POST {"query": [...], "prompts": [...], "labels": [...]}, texts with special tokens, returns
{"rewards": [...]}. Optional "scores" and "extra_logs" {name: [...]} in the response are logged.
"""

import http.client
import json
import random
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

from jaxrl.json_text import parse_json

_MARGIN_S = 1.0  # reserved within the time limit to return the result
_MAX_SHOWN = 200  # characters of a response in an error message
_TRANSIENT = (408, 425, 429)  # HTTP statuses below 500 that are worth a retry


def remote(
    data_sources: Sequence[str],
    solution_strs: Sequence[str],
    ground_truths: Sequence[Any],
    extra_infos: Sequence[dict[str, Any]],
    *,
    prompt_strs: Sequence[str],
    query_strs: Sequence[str],
    url: str,
    timeout_s: float,
    attempts: int = 5,
    wait_s: float = 0.5,
) -> list[dict[str, Any]]:
    """Scores from the server at `url`; with several urls, joined by commas, retries rotate.

    A request is retried if the server cannot be reached, times out, or returns 5xx or "too many
    requests": at most `attempts` times within `timeout_s`, after `wait_s` seconds, doubled each
    time. Raises RuntimeError with the last failure, ValueError for an invalid response.
    """
    end = time.monotonic() + timeout_s - _MARGIN_S
    body = {"query": query_strs, "prompts": prompt_strs, "labels": ground_truths}
    urls = url.split(",")
    first, failure = random.randrange(len(urls)), "no time for an attempt"
    for attempt in range(attempts):
        server = urls[(first + attempt) % len(urls)]
        left_s = end - time.monotonic()
        if left_s <= 0:
            break
        try:
            return read_scores(post(server, body, timeout_s=left_s), len(query_strs), server)
        except urllib.error.HTTPError as error:
            failure = f"{server} returned status {error.code} {error.reason}"
            if not may_pass(error.code):
                raise RuntimeError(failure) from error
        except (OSError, http.client.HTTPException) as error:  # connection, timeout, partial reply
            failure = f"{server}: {error}"
        pause_s = wait_s * 2**attempt
        time.sleep(max(0.0, min(pause_s, end - time.monotonic())))
    raise RuntimeError(f"no score after {attempts} attempts within {timeout_s:g} s; {failure}")


def may_pass(status: int) -> bool:
    """Whether a request that failed with this HTTP status is worth another attempt."""
    return status >= 500 or status in _TRANSIENT


def post(url: str, body: dict[str, Any], *, timeout_s: float) -> bytes:
    """The body of the server's response. Raises OSError; HTTPError is a subclass."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=timeout_s) as response:
        return response.read()


def read_scores(body: bytes, n: int, url: str) -> list[dict[str, Any]]:
    """For each of `n` queries, its reward as "score" and the values to log."""
    try:
        found = parse_json(body, finite=False)  # a NaN is an error of its response only
    except ValueError as error:
        raise ValueError(
            f"{url} returned {body[:_MAX_SHOWN]!r}, which is not JSON ({error})"
        ) from error
    if not isinstance(found, dict) or not isinstance(found.get("rewards"), list):
        shown = list(found) if isinstance(found, dict) else type(found).__name__
        raise ValueError(f"{url} returned no list of 'rewards' but {shown}")
    logs = found.get("extra_logs") or {}
    if not isinstance(logs, dict):
        raise ValueError(f"{url} returned extra_logs of type {type(logs).__name__}, not an object")
    columns = {"scores": found.get("scores")} | logs | {"score": found["rewards"]}
    lists = {name: values for name, values in columns.items() if isinstance(values, list)}
    for name, values in lists.items():
        if len(values) != n:
            shown = "rewards" if name == "score" else name
            raise ValueError(f"{url} returned {len(values)} {shown} for {n} queries")
    return [{name: values[i] for name, values in lists.items()} for i in range(n)]
