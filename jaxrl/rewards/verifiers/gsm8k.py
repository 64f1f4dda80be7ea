"""GSM8K's final answer: the number after "####", or, with method "flexible", the last number."""

import re
from typing import Any

from jaxrl.rewards.verifiers.ground_truth import read_number
from jaxrl.rewards.verifiers.numbers import last_number_after, last_number_of, same_number

# What may be between the mark and the number: #### +7, #### $7, #### **7**, #### \boxed{7}
_MARKED = re.compile(r"####(?:\\boxed\{|\\[$(]|[ *$+(])*+")


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

    method "strict" reads the last "#### number", "flexible" the last number of any kind. Numbers
    are compared as numbers, so "1,234" and "72." are accepted. The ground truth is a number, also
    with words and units, or GSM8K's full solution text. Raises ValueError for another one.
    """
    if method not in ("strict", "flexible"):
        raise ValueError(f"gsm8k has no method {method!r}; use 'strict' or 'flexible'")
    expected = read_number(ground_truth)
    strict = method == "strict"
    found = last_number_after(_MARKED, solution_str) if strict else last_number_of(solution_str)
    if found is None:
        return 0.0
    return 1.0 if same_number(found, expected) else format_score
