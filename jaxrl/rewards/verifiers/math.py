r"""Mathematical equality through math-verify: fractions, sets, intervals, expressions in LaTeX.

math-verify's time limits use SIGALRM, which cannot interrupt inputs that hang in C (9^{9^{9}}).
They are off here; the reward pool kills the worker process instead (rewards/pool.py).
"""

import logging
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

_TAIL = 2000  # characters: the answer is at the end, and the search for it is slow on long texts


def math(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    *,
    boxed_only: bool = False,
) -> float:
    r"""1 if the answer equals the ground truth mathematically, else 0.

    The answer is the last \boxed{...} after the last </think>. Without one it is the last
    expression that math-verify finds, or nothing with `boxed_only`. Earlier boxes do not count, so
    that listing guesses does not pay.
    """
    if not ground_truth.strip():
        raise ValueError("the ground truth is empty; set an answer for every prompt")
    # math-verify warns that its time limits are off
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    response = solution_str.rpartition("</think>")[2]
    boxed = last_boxed(response)
    if boxed is None and boxed_only:
        return 0.0
    if boxed is not None and boxed.strip() == ground_truth.strip():
        return 1.0
    gold = _parse(_in_box(ground_truth), latex_only=True)
    answer = _parse(response[-_TAIL:] if boxed is None else _in_box(boxed), latex_only=False)
    return float(verify(gold, answer, timeout_seconds=None))


def last_boxed(text: str) -> str | None:
    r"""The content of the last complete \boxed{...} or \fbox{...}, with balanced braces."""
    start = max(text.rfind(r"\boxed{"), text.rfind(r"\fbox{"))
    while start >= 0:
        depth, first = 0, text.index("{", start)
        for place in range(first, len(text)):
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            if depth == 0:
                return text[first + 1 : place]
        start = max(text.rfind(r"\boxed{", 0, start), text.rfind(r"\fbox{", 0, start))
    return None


def _in_box(answer: str) -> str:
    return answer if last_boxed(answer) is not None else rf"\boxed{{{answer}}}"


def _parse(text: str, *, latex_only: bool) -> list[Any]:
    kinds: list[LatexExtractionConfig | ExprExtractionConfig] = [
        LatexExtractionConfig(boxed_match_priority=0)
    ]
    if not latex_only:
        kinds.append(ExprExtractionConfig())
    return parse(
        text,
        extraction_config=kinds,
        parsing_timeout=None,  # pyright: ignore[reportArgumentType]  None is off
    )
