"""Whether an output or a result of a program is the expected one.

Numbers with a fraction are equal within a tolerance, relative and absolute. Everything else is
equal exactly: integers, text, and words of an output that are no decimal number with a fraction.
"""

import itertools
import math
import re
from decimal import Decimal

_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?", re.ASCII)
# A point, or an exponent with its sign, as languages print floats: 1e5 may be hexadecimal.
_FRACTION = re.compile(r"[+-]?(?:(?:\d+\.\d*|\.\d+)(?:[eE][+-]?\d+)?|\d+[eE][+-]\d+)", re.ASCII)
_MAX_DIGITS = 400  # of a number with a fraction: a float has fewer


def same_output(output: str, expected: str, tolerance: float) -> bool:
    """Compares lines word by word, ignoring white space around and between words."""
    ours, theirs = (
        [line.split() for line in text.strip().split("\n")] for text in (output, expected)
    )
    if [len(words) for words in ours] != [len(words) for words in theirs]:
        return False
    pairs = zip(itertools.chain(*ours), itertools.chain(*theirs), strict=True)
    return all(a == b or _same_number(a, b, tolerance) for a, b in pairs)


def same_value(result: object, expected: object, tolerance: float) -> bool:
    """Compares a result with the value of a JSON text; tuples are lists, and keys are text.

    A bool is no number. The tolerance applies where the expected number is a float.
    """
    if isinstance(expected, list) and isinstance(result, list | tuple):
        return len(result) == len(expected) and all(
            same_value(a, b, tolerance) for a, b in zip(result, expected, strict=True)
        )
    if isinstance(expected, dict) and isinstance(result, dict):
        ours, theirs = ({_key(k): v for k, v in x.items()} for x in (result, expected))
        return ours.keys() == theirs.keys() and all(
            same_value(ours[key], theirs[key], tolerance) for key in theirs
        )
    if isinstance(result, bool) or isinstance(expected, bool):
        return result is expected
    if isinstance(expected, float) and isinstance(result, int | float):
        return _is_close(result, expected, tolerance)
    return result == expected


def _key(key: object) -> str:
    """A key as JSON has it."""
    if key is None or isinstance(key, bool):
        return {None: "null", True: "true", False: "false"}[key]
    return hex(key) if isinstance(key, int) and key.bit_length() > 64 else str(key)


def _same_number(word: str, expected: str, tolerance: float) -> bool:
    """Whether two different words are equal numbers, of which one has a fraction."""
    if len(word) > _MAX_DIGITS or len(expected) > _MAX_DIGITS:
        return False
    if _FRACTION.fullmatch(expected) and _NUMBER.fullmatch(word):
        ours, theirs = float(word), float(expected)
        return math.isfinite(theirs) and _is_close(ours, theirs, tolerance)
    if _FRACTION.fullmatch(word) and _NUMBER.fullmatch(expected):
        return Decimal(word) == Decimal(expected)
    return False


def _is_close(a: int | float, b: float, tolerance: float) -> bool:
    try:
        return a == b or math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance)
    except OverflowError:  # an integer that no float can hold
        return False
