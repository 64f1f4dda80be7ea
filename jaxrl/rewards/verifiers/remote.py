"""Scores from a server, with the HTTP interface of OpenRLHF's --reward.remote_url.

POST {"query": [...], "prompts": [...], "labels": [...]}, texts with special tokens, returns
{"rewards": [...]}. Optional "scores" and "extra_logs" {name: [...]} in the response are logged.
"""

import random
import time
from collections.abc import Sequence
from typing import Any

from jaxrl.http.client import JsonSender, RequestFailed, with_retries
from jaxrl.json_text import parse_json

_MARGIN_S = 1.0  # reserved within the time limit to return the result
_MAX_SHOWN = 200  # characters of a response in an error message
_MAX_BYTES = 1 << 28  # of a response


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
    first, sender = random.randrange(len(urls)), JsonSender(max_bytes=_MAX_BYTES)

    def send(attempt: int) -> list[dict[str, Any]]:
        server = urls[(first + attempt) % len(urls)]
        reply = sender.send(server, body, timeout_s=end - time.monotonic())
        return read_scores(reply, len(query_strs), server)

    try:
        return with_retries(send, attempts=attempts, first_wait_s=wait_s, end=end)
    except RequestFailed as error:
        if error.final:
            raise RuntimeError(str(error)) from error
        raise RuntimeError(
            f"no score after {attempts} attempts within {timeout_s:g} s; {error}"
        ) from error


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
