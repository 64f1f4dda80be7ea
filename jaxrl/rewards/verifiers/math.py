r"""Mathematical equality through math-verify: fractions, sets, intervals, expressions in LaTeX.

math-verify's time limits use SIGALRM, which cannot interrupt inputs that hang in C (9^{9^{9}}).
They are off here; the reward pool kills the worker process instead (rewards/pool.py).
"""

import logging
import re
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from jaxrl.rewards.verifiers.ground_truth import as_text

_MAX_RESPONSE = 100_000  # characters: only the end of a longer response is looked at
_TAIL = 2000  # characters: the search for an unboxed answer is slow on long texts
_MAX_ANSWER = 2000  # characters: a longer boxed answer is wrong unless it is the ground truth
_BRACE = re.compile(r"\\(?:boxed|fbox)\{|[{}]")


def math(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    boxed_only: bool = False,
) -> float:
    r"""1 if the answer equals the ground truth mathematically, else 0.

    The answer is the last \boxed{...} after the last </think>. Without one it is the last
    expression that math-verify finds, or nothing with `boxed_only`. Earlier boxes do not count, so
    that listing guesses does not pay. Of a long response only the last 100,000 characters count; a
    boxed answer over 2,000 characters is wrong unless it is the ground truth itself.
    """
    truth = as_text(ground_truth)
    if not truth.strip():
        raise ValueError("the ground truth is empty; set an answer for every prompt")
    # math-verify warns that its time limits are off
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    response = solution_str[-_MAX_RESPONSE:].rpartition("</think>")[2]
    boxed = last_boxed(response)
    if boxed is None and boxed_only:
        return 0.0
    if boxed is not None and boxed.strip() == truth.strip():
        return 1.0
    if boxed is not None and len(boxed) > _MAX_ANSWER:
        return 0.0
    gold = _parse(_in_box(truth), latex_only=True)
    answer = _parse(response[-_TAIL:] if boxed is None else _in_box(boxed), latex_only=False)
    return float(verify(gold, answer, timeout_seconds=None))


def last_boxed(text: str) -> str | None:
    r"""The content of the last complete \boxed{...} or \fbox{...}, with balanced braces.

    Reads the text once: of the boxes that are closed, the one that starts last.
    """
    open_braces: list[int] = []  # start of the content if it is a box, else -1
    start, end = -1, -1
    for brace in _BRACE.finditer(text):
        if brace[0] != "}":
            open_braces.append(brace.end() if len(brace[0]) > 1 else -1)
        elif open_braces and (first := open_braces.pop()) > start:
            start, end = first, brace.start()
    return None if start < 0 else text[start:end]


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
