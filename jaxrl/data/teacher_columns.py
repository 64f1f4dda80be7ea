"""Most likely tokens of a teacher in a column of SFT rows.

The value is a list with one object for each learned token, or null for a row without a teacher:

    {"token": 42, "ids": [42, 7, 13], "logprobs": [-0.1, -2.6, -4.0]}

`token` is the id of the learned token; `ids` are the most likely ids in its place, with their
natural logprobs under the teacher.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl.types import TeacherTokens


def read_teacher_tokens(
    row: Mapping[str, Any],
    column: str,
    tokens: np.ndarray,
    loss_mask: np.ndarray,
    *,
    k: int,
    n_vocab: int,
    place: str,
) -> TeacherTokens | None:
    """The `k` most likely ids at every token of a sequence; zeros where `loss_mask` is False.

    None for a row whose column is null. Raises ValueError with the place if the row has no such
    column, or an entry that does not fit the learned tokens.
    """
    if column not in row:
        raise ValueError(
            f"{place} has no column {column!r}, which data.teacher_logprobs names; correct it, or "
            "write null for rows without a teacher's logprobs"
        )
    entries = row[column]
    if entries is None:
        return None
    learned = np.flatnonzero(loss_mask)
    if not isinstance(entries, Sequence) or len(entries) != len(learned):
        n = len(entries) if isinstance(entries, Sequence) else type(entries).__name__
        raise ValueError(
            f"{place}: {column} has {n} entries for {len(learned)} learned tokens, the stop token "
            "included; write one for each token, or null"
        )
    ids, logp = (np.zeros((len(tokens), k), dtype) for dtype in (np.int32, np.float32))
    for i, (at, entry) in enumerate(zip(learned, entries, strict=True)):
        where = f"{place}: entry {i} of {column}"
        ids[at], logp[at] = _most_likely(entry, int(tokens[at]), k, n_vocab, where)
    return TeacherTokens(ids, logp)


def _most_likely(
    entry: Any, token: int, k: int, n_vocab: int, where: str
) -> tuple[list[int], list[float]]:
    """The ids and logprobs of an entry, the most likely first."""
    fields = entry if isinstance(entry, Mapping) else {}
    ids: Any = fields.get("ids")
    logprobs: Any = fields.get("logprobs")
    if not (_is_list(ids, int) and _is_list(logprobs, int | float) and len(ids) == len(logprobs)):
        raise ValueError(
            f"{where} is not {{'token': ID, 'ids': [ID, ...], 'logprobs': [NUMBER, ...]}} with as "
            "many logprobs as ids"
        )
    if fields.get("token") != token:
        raise ValueError(
            f"{where} is about the token {fields.get('token')!r}, and the learned token is "
            f"{token}; write the ids of the policy's tokenizer, for the response as the chat "
            "template has it"
        )
    if len(ids) < k or len(set(ids)) < len(ids):
        raise ValueError(
            f"{where} has {len(set(ids))} different ids, and algorithm.kl_top_k={k} are compared; "
            f"write at least {k}, or lower algorithm.kl_top_k"
        )
    if wrong := [i for i in ids if not 0 <= i < n_vocab]:
        raise ValueError(f"{where} has the id {wrong[0]}, and the tokenizer has {n_vocab}")
    if not all(math.isfinite(p) and p <= 0 for p in logprobs) or _mass(logprobs) > 1.001:
        raise ValueError(f"{where} has logprobs that are not those of a distribution")
    pairs = sorted(zip(logprobs, ids, strict=True), key=lambda pair: -pair[0])[:k]
    return [i for _, i in pairs], [float(p) for p, _ in pairs]


def _mass(logprobs: Sequence[float]) -> float:
    return math.fsum(math.exp(p) for p in logprobs)


def _is_list(value: Any, kind: Any) -> bool:
    return isinstance(value, Sequence) and all(
        isinstance(x, kind) and not isinstance(x, bool) for x in value
    )
