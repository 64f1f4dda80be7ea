r"""Mathematical equality: numbers as numbers, everything else through math-verify.

math-verify reads fractions, sets, intervals and expressions in LaTeX. Its time limits use SIGALRM,
which cannot interrupt inputs that hang in C (9^{9^{9}}). They are off here; the reward pool kills
the worker process instead (rewards/pool.py).
"""

import logging
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from jaxrl.rewards.verifiers.answer_text import number_in_words, undecorated
from jaxrl.rewards.verifiers.extraction import last_boxed, last_tagged
from jaxrl.rewards.verifiers.ground_truth import MAX_ANSWER, read_expression, read_text
from jaxrl.rewards.verifiers.numbers import same_number, write_exponents_out

_MAX_RESPONSE = 100_000  # characters: only the end of a longer response is looked at
_TAIL = 2000  # characters: the search for an unboxed answer is slow on long texts
_MAX_DIGITS = 400  # of a number that is written out for math-verify
_DECIMALS = 6  # of expressions that are compared as numbers


def math(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    boxed_only: bool = False,
) -> float:
    r"""1 if the answer equals the ground truth mathematically, else 0.

    After the last </think>, the answer is the last <answer>...</answer> (in it, the last \boxed),
    else the last \boxed{...}, else the last expression that math-verify finds. With `boxed_only`
    it is the last \boxed or nothing. Earlier boxes do not count, so that listing guesses does not
    pay. Of a long response only the last 100,000 characters count; an answer over 2,000 characters
    is wrong unless it is the ground truth itself. Raises ValueError for a truth that is no answer.
    """
    raw = read_text(ground_truth)
    response = solution_str[-_MAX_RESPONSE:].rpartition("</think>")[2]
    marked = _marked_answer(response, boxed_only)
    if marked is not None and marked.strip() == raw:
        return 1.0
    truth = read_expression(ground_truth)
    if marked is None:
        if boxed_only:
            return 0.0
        return _same_expression(truth, write_exponents_out(response[-_TAIL:]))
    if len(marked) > MAX_ANSWER:
        return 0.0
    answer = undecorated(marked)
    if answer == truth:
        return 1.0
    expected, given = number_in_words(truth), number_in_words(answer)
    if expected is not None and given is not None:
        return float(same_number(given, expected))
    return _same_expression(truth, answer if "$" in answer else _in_box(answer))


def _marked_answer(response: str, boxed_only: bool) -> str | None:
    """The answer in tags or in a box, None if there is neither."""
    tagged = None if boxed_only else last_tagged(response)
    if tagged is None or not tagged.strip():
        return last_boxed(response)
    boxed = last_boxed(tagged)
    return tagged if boxed is None else boxed


def _same_expression(truth: str, answer: str) -> float:
    """Whether math-verify finds the truth in a text with a box, or in one without."""
    # math-verify warns that its time limits are off
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    number = number_in_words(truth)
    decimals = _DECIMALS
    if number is not None and abs(number.adjusted()) < _MAX_DIGITS:
        truth = format(number, "f")
        if number:  # small numbers have as many digits as those near 1
            decimals = max(_DECIMALS, _DECIMALS - number.adjusted())
    gold = _parse(_in_box(truth), latex_only=True)
    found = _parse(answer, latex_only=False)
    return float(verify(gold, found, float_rounding=decimals, timeout_seconds=None))


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
