"""Exact match of the response, or of the part that a pattern finds, with the ground truth."""

import re
from typing import Any

from jaxrl.rewards.verifiers.ground_truth import as_text


def exact(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    pattern: str = "",
    ignore_case: bool = True,
) -> float:
    r"""1 if the answer equals the ground truth, ignoring surrounding white space, else 0.

    Without a pattern the answer is the entire response. Otherwise it is the last match of the
    regular expression ('.' matches newlines), or its first group if it has one, as in
    r"<answer>(.*?)</answer>".
    """
    answer: str | None = solution_str
    if pattern:
        matches = list(re.finditer(pattern, solution_str, re.DOTALL))
        answer = matches[-1][1 if matches[-1].re.groups else 0] if matches else None
    if answer is None:
        return 0.0
    answer, truth = answer.strip(), as_text(ground_truth).strip()
    return float(answer.casefold() == truth.casefold() if ignore_case else answer == truth)
