"""Ground truths: any JSON value of the dataset, of which most verifiers need the text."""

import json
import math
import re
from decimal import Decimal
from typing import Any

from jaxrl.rewards.verifiers.answer_text import UNITS, number_in_words, undecorated
from jaxrl.rewards.verifiers.extraction import after_mark, last_boxed
from jaxrl.rewards.verifiers.numbers import decimal_text

MAX_ANSWER = 2000  # characters of an answer that is an expression
_MAX_WORDS = 3  # next to numbers: with more it is a sentence, which is no answer
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
_PLAIN = re.compile(r"-?[0-9]{1,18}(?:\.[0-9]{1,18})?")  # most truths, without a further look
_TEXT = re.compile(r"\\text[a-z]*\{[^{}]*\}")


def as_text(ground_truth: Any) -> str:
    """The text of a string, a number or a truth value; numbers without an exponent, 42 for 42.0.

    Raises ValueError for other values, and for NaN and infinity: a column of integers with a gap
    has NaN there.
    """
    if isinstance(ground_truth, str):
        return ground_truth
    if isinstance(ground_truth, float):
        if not math.isfinite(ground_truth):
            raise ValueError(
                f"the ground truth is {ground_truth}, a gap in a column of numbers; fill it, or "
                "remove the row"
            )
        return decimal_text(ground_truth)
    if isinstance(ground_truth, bool | int):
        return json.dumps(ground_truth)
    raise ValueError(
        f"the ground truth {ground_truth!r:.80} is of type {type(ground_truth).__name__}, this "
        "reward compares text or a number; use a reward for this form, or convert the column"
    )


def read_text(ground_truth: Any) -> str:
    """The text of a ground truth without surrounding white space. Raises ValueError if empty."""
    text = as_text(ground_truth).strip()
    if not text:
        raise ValueError("the ground truth is empty; set an answer for every prompt")
    return text


def read_number(ground_truth: Any) -> Decimal:
    """The number that a ground truth is, alone, with words and units, or after "####".

    Raises ValueError for text that is not one number.
    """
    text = read_text(ground_truth)
    if _PLAIN.fullmatch(text):
        return Decimal(text)
    text = undecorated(_answer_part(text))
    number = number_in_words(text.rstrip("%").removesuffix("\\"), units=UNITS)
    if number is None:
        raise ValueError(
            f"the ground truth {ground_truth!r:.80} is not one number; give the number alone, or "
            "use the reward math (expressions) or exact (text)"
        )
    return number


def read_expression(ground_truth: Any) -> str:
    r"""The answer in a ground truth: all of it, or what is in its last \boxed or after "####".

    Raises ValueError if it is empty, too long for an expression, or a sentence with numbers.
    """
    truth = read_text(ground_truth)
    if _PLAIN.fullmatch(truth):
        return truth
    text = undecorated(_answer_part(truth))
    if not text:
        raise ValueError("the ground truth is empty; set an answer for every prompt")
    if number_in_words(text) is None:
        words = _WORD.findall(_TEXT.sub("", text))
        is_sentence = len(words) > _MAX_WORDS and re.search("[0-9]", text) is not None
        if is_sentence or len(text) > MAX_ANSWER:
            raise ValueError(
                f"the ground truth {truth!r:.80} is no answer alone; give the number or the "
                r"expression, put it in \boxed{...}, or after ####"
            )
    return text


def _answer_part(truth: str) -> str:
    """The last box, or what is after the mark."""
    truth = after_mark(truth)
    boxed = last_boxed(truth)
    return truth if boxed is None else boxed
