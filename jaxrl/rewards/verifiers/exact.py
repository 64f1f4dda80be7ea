"""Is the response, or the part of it that a pattern finds, exactly the answer?"""

import re
from typing import Any


def exact(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    *,
    pattern: str = "",
    ignore_case: bool = True,
) -> float:
    r"""1 if the answer equals the ground truth up to white space at the ends, else 0.

    Without a pattern the answer is the whole response. Otherwise it is the last match of that regular
    expression ('.' matches newlines), its first group where it has one: r"<answer>(.*?)</answer>".
    """
    answer: str | None = solution_str
    if pattern:
        matches = list(re.finditer(pattern, solution_str, re.DOTALL))
        answer = matches[-1][1 if matches[-1].re.groups else 0] if matches else None
    if answer is None:
        return 0.0
    answer, truth = answer.strip(), ground_truth.strip()
    return float(answer.casefold() == truth.casefold() if ignore_case else answer == truth)
