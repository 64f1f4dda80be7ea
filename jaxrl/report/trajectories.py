"""The trajectories of the page: conversations whose tokens have values, read from samples.jsonl.

Another program may have written the file: a trajectory that is not of the form of
trainer/phases/trajectories.py is left out.
"""

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeGuard

from jaxrl.report.record import as_float, cut, step_of

MAX_TRAJECTORY_CHARS = 6_000_000  # of all of them in a page, as JSON
MAX_TEXT_CHARS = 20_000  # of a text in one
VALUES = ("logp", "difference", "advantage")  # of a token; a list or null
LABELS = ("kind", "source", "answer", "finish", "error")


def trajectory_rows(samples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The trajectories of the samples, in their order, with MAX_TRAJECTORY_CHARS together.

    If these are too few for all, they are in turn the next of the lowest rewards, of the largest
    differences between the logprobs of engine and trainer, of the longest and of the newest.
    """
    rows = [row for sample in samples if (row := read_row(sample)) is not None]
    lens = [len(json.dumps(row)) for row in rows]
    kept, n_chars = set(), 0
    for i in _worst_first(rows):
        if n_chars + lens[i] <= MAX_TRAJECTORY_CHARS:
            kept.add(i)
            n_chars += lens[i]
    return [rows[i] for i in sorted(kept)]


def _worst_first(rows: Sequence[dict[str, Any]]) -> Iterator[int]:
    """Each index of the rows once."""

    def rank(value: float | None, sign: int) -> float:
        return math.inf if value is None or math.isnan(value) else sign * value

    orders = [
        [rank(row["reward"], 1) for row in rows],
        [rank(row["difference"], -1) for row in rows],
        [-float(row["n_tokens"]) for row in rows],
        [-float(row["step"]) for row in rows],
    ]
    ranked = [sorted(range(len(rows)), key=order.__getitem__) for order in orders]
    yield from dict.fromkeys(i for turn in zip(*ranked, strict=True) for i in turn)


def read_row(sample: dict[str, Any]) -> dict[str, Any] | None:
    """A trajectory and what the page sorts and filters by; None if the sample has none.

    `difference` is the largest |engine - trainer| logprob of the trained tokens, None if the run
    did not compute it.
    """
    found = sample.get("trajectory")
    if not isinstance(found, dict) or not isinstance(found.get("sequences"), list):
        return None
    sequences = [one for value in found["sequences"] if (one := read_sequence(value)) is not None]
    if not sequences or (step := step_of(sample)) is None:
        return None
    differences = [
        abs(x)
        for one in sequences
        for x, trained in zip(one["difference"] or (), one["mask"], strict=False)
        if trained and x is not None
    ]
    return {
        "step": step,
        **{name: as_text(sample.get(name, "")) for name in LABELS},
        "prompt_id": as_text(sample.get("prompt_id", "")),
        "sample": as_text(sample.get("sample", "")),
        "reward": as_float(sample.get("reward")),
        "n_tokens": sum(one["n_tokens"] for one in sequences),
        "n_turns": sum(turn["role"] == "assistant" for one in sequences for turn in one["turns"]),
        "difference": max(differences, default=None),
        "parts": read_numbers(found.get("parts")),
        "counts": read_numbers(found.get("counts")),
        "reward_s": as_float(found.get("reward_s")),
        "spans": read_spans(found.get("spans")),
        "n_sequences": as_count(found.get("n_sequences"), len(sequences)),
        "sequences": sequences,
    }


def read_sequence(value: Any) -> dict[str, Any] | None:
    """A conversation with checked fields; None if the lists do not fit each other."""
    if not isinstance(value, dict) or not _is_list(value.get("tokens"), str):
        return None
    tokens, mask = value["tokens"], value.get("mask")
    if not _is_list(mask, int) or len(mask) != len(tokens):
        return None
    values = {name: read_values(value.get(name), len(tokens)) for name in VALUES}
    n_tokens = as_count(value.get("n_tokens"), len(tokens))
    turns = value.get("turns")
    return {
        "prompt": read_pairs(value.get("prompt")),
        "n_prompt_messages": as_count(value.get("n_prompt_messages"), 0),
        "n_prompt_tokens": as_count(value.get("n_prompt_tokens"), 0),
        "n_tokens": n_tokens,
        "n_left_out": n_tokens - len(tokens),
        "tokens": [cut(token, MAX_TEXT_CHARS) for token in tokens],
        "mask": [int(bool(x)) for x in mask],
        **values,
        "turns": [*read_turns(turns if isinstance(turns, list) else [], value, len(tokens))],
    }


def read_turns(turns: list[Any], sequence: dict[str, Any], n: int) -> Iterator[dict[str, Any]]:
    """The turns with their range in the `n` tokens of the record, whose middle may be missing."""
    kept = sequence.get("kept")
    spans = kept if isinstance(kept, list) else []
    spans = [span for span in spans if _is_list(span, int) and len(span) == 2] or [[0, n]]

    def place(token: int) -> int:
        """The index in the record of a token of the response."""
        return min(sum(min(max(token - first, 0), max(end - first, 0)) for first, end in spans), n)

    for turn in turns:
        if not isinstance(turn, dict):
            continue
        start, end = (as_count(turn.get(name), -1) for name in ("start", "end"))
        if not 0 <= start < end:
            continue
        yield {
            "role": as_text(turn.get("role", "")),
            "start": place(start),
            "end": place(end),
            "n_tokens": end - start,
            "reward": as_float(turn.get("reward")),
            "calls": read_pairs(turn.get("calls")),
        }


def read_values(value: Any, n: int) -> list[float | None] | None:
    """Numbers of `n` tokens; None if the run has not computed them, or the list does not fit."""
    if not isinstance(value, list) or len(value) != n:
        return None
    return [as_float(x) for x in value]


def read_numbers(value: Any) -> dict[str, float]:
    """The numbers of an object by name."""
    items = value.items() if isinstance(value, dict) else ()
    found = {as_text(name): as_float(x) for name, x in items}
    return {name: x for name, x in found.items() if x is not None}


def read_pairs(value: Any) -> list[list[str]]:
    """Pairs of texts; [role, text] of messages or [name, arguments] of calls."""
    pairs = value if isinstance(value, list) else []
    pairs = [pair for pair in pairs if _is_list(pair, str) and len(pair) == 2]
    return [[as_text(a), as_text(b)] for a, b in pairs]


def read_spans(value: Any) -> list[tuple[str, float, float]]:
    """(phase, start, end) in seconds."""
    spans = value if isinstance(value, list) else []
    spans = [span for span in spans if isinstance(span, list) and len(span) == 3]
    found = [(as_text(name), as_float(start), as_float(end)) for name, start, end in spans]
    return [
        (name, start, end)
        for name, start, end in found
        if start is not None and end is not None and 0.0 <= start <= end < math.inf
    ]


def as_count(value: Any, default: int) -> int:
    """A number of tokens, messages or sequences that the page's script can hold exactly."""
    return value if type(value) is int and 0 <= value < 2**53 else default


def as_text(value: Any) -> str:
    return cut(value if isinstance(value, str) else json.dumps(value), MAX_TEXT_CHARS)


def _is_list(value: Any, kind: type) -> TypeGuard[list[Any]]:
    return isinstance(value, list) and all(isinstance(one, kind) for one in value)
