"""Exact match of the response, or of the part that a pattern finds, with the ground truth."""

import collections
import re
from typing import Any

from jaxrl.rewards.verifiers.extraction import last_between
from jaxrl.rewards.verifiers.ground_truth import as_text, read_text
from jaxrl.rewards.verifiers.numbers import same_number, whole_number

# before(.*?)after, which a search of the two texts finds in linear time
_BETWEEN = re.compile(r"([^\\.^$*+?{}\[\]|()]+)\(\.\*\?\)([^\\.^$*+?{}\[\]|()]+)")


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
    r"<answer>(.*?)</answer>". A ground truth that is a number in the data, not text, is compared
    as a number: 42.0, as pandas writes integers of a column with a gap, equals 42.
    """
    truth = read_text(ground_truth)
    answer = _find(pattern, solution_str) if pattern else solution_str
    if answer is None:
        return 0.0
    answer = answer.strip()
    if answer.casefold() == truth.casefold() if ignore_case else answer == truth:
        return 1.0
    if not isinstance(ground_truth, int | float) or isinstance(ground_truth, bool):
        return 0.0
    number, expected = whole_number(answer), whole_number(as_text(ground_truth))
    return float(number is not None and expected is not None and same_number(number, expected))


def _find(pattern: str, response: str) -> str | None:
    """The last match of the pattern."""
    if between := _BETWEEN.fullmatch(pattern):
        return last_between(response, *between.groups())
    last = collections.deque(re.finditer(pattern, response, re.DOTALL), maxlen=1)
    return last[0][1 if last[0].re.groups else 0] if last else None
