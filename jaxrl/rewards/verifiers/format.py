"""Checks the form of a response, whether or not its answer is right."""

import re
from typing import Any

THINK_ANSWER = r"\s*<think>.*</think>\s*<answer>.*</answer>\s*"


def format(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    pattern: str = THINK_ANSWER,
    tags: str = "think,answer",
) -> float:
    """1 if the whole response matches `pattern` and has each tag exactly once, else 0.

    The default is the form of DeepSeek-R1 (arXiv:2501.12948, table 1): <think>...</think>, then
    <answer>...</answer>. For a pattern without tags set tags="".
    """
    for tag in filter(None, tags.split(",")):
        if solution_str.count(f"<{tag}>") != 1 or solution_str.count(f"</{tag}>") != 1:
            return 0.0
    return float(re.fullmatch(pattern, solution_str, re.DOTALL) is not None)
