"""Logprobs of given tokens in the replies of servers: vLLM's form, and SGLang's."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl.json_text import Json, parse_json

FORMS = ("vllm", "sglang")  # jaxrl.serve has vLLM's


@dataclasses.dataclass(frozen=True)
class GivenScores:
    """A model's logprobs at the last tokens of a sequence."""

    logp: np.ndarray  # float32 [n], of the tokens themselves
    ids: np.ndarray  # int32 [n, k], the most likely ids
    top_logp: np.ndarray  # float32 [n, k]
    texts: tuple[str | None, ...] = ()  # of the tokens, if the server returns them


def request_body(form: str, model: str, tokens: Sequence[int], n: int, k: int) -> Json:
    """The body of a request for the logprobs of the last `n` tokens, with the `k` most likely."""
    if form == "sglang":
        return {
            "input_ids": list(tokens),
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": len(tokens) - n - 1,
            "top_logprobs_num": k,
            "return_text_in_logprobs": True,
        }
    return {
        "model": model,
        "prompt": list(tokens),
        "max_tokens": 1,
        "temperature": 1.0,
        "prompt_logprobs": k,
    }


def read_scores(form: str, reply: bytes, tokens: Sequence[int], n: int, k: int) -> GivenScores:
    """The scores in a reply. Raises ValueError if it has not those of these tokens."""
    value = parse_json(reply, finite=False)
    try:
        read = _sglang_rows if form == "sglang" else _vllm_rows
        rows = read(value, tokens, n)
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"the reply has no prompt logprobs ({reply[:200]!r})") from error
    logp, texts, tops = zip(*rows, strict=True)
    for place, top in enumerate(tops):
        if len(top) < k:
            raise ValueError(
                f"the reply has {len(top)} of the {k} most likely tokens in place of token {place}"
            )
    tops = [sorted(top, key=lambda pair: -pair[1])[:k] for top in tops]
    pairs = np.array(tops, np.float64).reshape(n, k, 2)
    found = GivenScores(
        np.array(logp, np.float32),
        pairs[..., 0].astype(np.int32),
        pairs[..., 1].astype(np.float32),
        texts,
    )
    if not all((np.isfinite(x) & (x <= 1e-3)).all() for x in (found.logp, found.top_logp)):
        raise ValueError("the reply has logprobs that are above 0 or not finite")
    return found


# (logprob, text, most likely (id, logprob)) of a token
_Row = tuple[float, str | None, list[tuple[int, float]]]


def _vllm_rows(value: Any, tokens: Sequence[int], n: int) -> list[_Row]:
    """From choices[0].prompt_logprobs: for each token an object by id, null for the first."""
    given = value["choices"][0]["prompt_logprobs"]
    if len(given) != len(tokens):
        raise ValueError(f"the reply has logprobs of {len(given)} tokens, not of {len(tokens)}")
    rows = []
    for token, row in zip(tokens[-n:], given[-n:], strict=True):
        own = row[str(token)]
        top = [(int(i), _number(entry["logprob"])) for i, entry in row.items()]
        rows.append((_number(own["logprob"]), own.get("decoded_token"), top))
    return rows


def _sglang_rows(value: Any, tokens: Sequence[int], n: int) -> list[_Row]:
    """From meta_info: (logprob, id, text) of the tokens, and lists of these of the likely ones."""
    meta = value["meta_info"]
    own, likely = meta["input_token_logprobs"][-n:], meta.get("input_top_logprobs") or []
    ids = [entry[1] for entry in own]
    if ids != list(tokens[-n:]):
        raise ValueError(f"the reply has logprobs of the tokens {ids[:8]}..., not of those sent")
    tops = likely[-n:] or [[]] * n
    return [
        (_number(p), text, [(int(i), _number(q)) for q, i, *_ in top or []])
        for (p, _, text), top in zip(own, tops, strict=True)
    ]


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan
