"""GSM8K's final answer: the number after "####", or, with method "flexible", the last number."""

import re
from typing import Any

from jaxrl.rewards.verifiers.ground_truth import as_text
from jaxrl.rewards.verifiers.numbers import last_number_of, same_number

_MARKED = re.compile(r"#### *(-?\$?[0-9.,]+)")
_TAIL = 300  # characters, as in verl: the answer is at the end, and long responses stay cheap


def gsm8k(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    method: str = "strict",
    format_score: float = 0.0,
) -> float:
    """1 for the right number, `format_score` for a wrong number in the right form, else 0.

    method "strict" reads the last "#### number", "flexible" the last number of any kind, both in
    the last 300 characters, as in verl's reward_score/gsm8k. Numbers are compared as numbers, so
    "1,234" and "72." are accepted. The ground truth is a number or GSM8K's full solution text.
    """
    if method not in ("strict", "flexible"):
        raise ValueError(f"gsm8k has no method {method!r}; use 'strict' or 'flexible'")
    expected = last_number_of(as_text(ground_truth).rpartition("####")[2])
    if expected is None:
        raise ValueError(f"the ground truth {ground_truth!r} has no number; use another reward")
    answer = solution_str[-_TAIL:]
    if method == "strict":
        marked = _MARKED.findall(answer)
        answer = marked[-1] if marked else ""
    found = last_number_of(answer)
    if found is None:
        return 0.0
    return 1.0 if same_number(found, expected) else format_score
