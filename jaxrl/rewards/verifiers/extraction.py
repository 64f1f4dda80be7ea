r"""Finds the answer in a response or in a solution: tags, \boxed{...}, the mark "####".

Every function reads a text once, so that a long hostile response costs no more than its length.
"""

import re

MARK = "####"  # GSM8K's, before the answer
_BRACE = re.compile(r"\\(?:boxed|fbox)\{|[{}]")


def last_between(text: str, before: str, after: str) -> str | None:
    """The text between the last `before` that an `after` follows and that `after`, or None."""
    start = text.rfind(before, 0, max(text.rfind(after), 0))
    if start < 0:
        return None
    start += len(before)
    return text[start : text.find(after, start)]


def last_tagged(text: str) -> str | None:
    """The content of the last <answer>...</answer>, or None."""
    return last_between(text, "<answer>", "</answer>")


def last_boxed(text: str) -> str | None:
    r"""The content of the last complete \boxed{...} or \fbox{...}, with balanced braces.

    Of the boxes that are closed, the one that starts last.
    """
    open_braces: list[int] = []  # start of the content if it is a box, else -1
    start, end = -1, -1
    for brace in _BRACE.finditer(text):
        if brace[0] != "}":
            open_braces.append(brace.end() if len(brace[0]) > 1 else -1)
        elif open_braces and (first := open_braces.pop()) > start:
            start, end = first, brace.start()
    return None if start < 0 else text[start:end]


def after_mark(text: str) -> str:
    """The text after the last mark "####", or all of it."""
    return text.rpartition(MARK)[2]
