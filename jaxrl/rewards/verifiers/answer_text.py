r"""The text of an answer without what surrounds it: delimiters, LaTeX styles, words and units."""

import re
from decimal import Decimal

from jaxrl.rewards.verifiers.numbers import split_number

_COLOR = re.compile(r"\\(?:text)?color(?:\[[A-Za-z]*\])?\s?\{[^{}]*\}")
_STYLE = re.compile(
    r"\\(?:underline|emph|mathbf|mathrm|mathit|boldsymbol|bm|bf|rm|(?:display|text)style|[lL]arge)"
    r"(?![A-Za-z])\s?"
)
_LEAD_IN = re.compile(
    r"\s*(?:(?:so|thus|the|final|correct) )*answer(?:\s+is\b\s?:?|\s?[:=])"
    r"|(?:\\approx(?![A-Za-z])|\\sim(?:eq)?(?![A-Za-z])|[\s\N{ALMOST EQUAL TO}=~*])++",
    re.IGNORECASE,
)
_END = " \t\r\n.,;:*"  # also after a backslash, which is a space of LaTeX
_LATEX_ENDS = ("\\", "\\!", "\\quad", "\\qquad")
_OUTER = re.compile(
    r"\s*(?:\$\$?([^$]*)\$\$?|\\\(((?:[^\\]|\\(?![()]))*)\\\)|\\\[((?:[^\\]|\\(?![\[\]]))*)\\\]"
    r"|\{([^{}]*)\}|\\text(?:bf|it|rm|normal)?\{([^{}]*)\})\s*"
)
_TEXT = re.compile(r"\\(?:text(?:bf|it|rm|normal)?|mbox)\{([^{}]*)\}")
_GAP = re.compile(r"\\[ ,;:!]|~|\\q?quad(?![A-Za-z])")
_LABEL = re.compile(r"\([A-Za-z]\)|^\s*[A-Za-z]\s?=(?!=)")  # (A) 12, x = 12
_BRACKETED = re.compile(r"\s*\(([^(),]*)\)\s*")
_CURRENCY = "$\N{EURO SIGN}\N{POUND SIGN}\N{YEN SIGN}\N{INDIAN RUPEE SIGN}"
_WORDS = re.compile(rf"(?:[A-Za-z]++(?:[-'/][A-Za-z]++)*+|[\s.,;:?\"'{re.escape(_CURRENCY)}])*+")
_SHORT = re.compile(
    "(?:a|is|it|of|in|at|on|to|an|am|pm|cm|mm|km|kg|mg|ml|ft|lb|oz|mi|hr|st|nd|rd|th)",
    re.IGNORECASE,
)
_FUNCTION = re.compile(
    "(?:sin|cos|tan|cot|sec|csc|log|exp|sqrt|mod|det|lim|max|min)", re.IGNORECASE
)
UNITS = frozenset("mgshLlKNJWVF")  # one letter, where no variable can be meant


def undecorated(text: str) -> str:
    r"""The answer in `The answer is $12.$`, `\approx 12`, `\color{red}{12}`, `\underline{12}`.

    Only what surrounds the answer is removed; a factorial and \overline stay.
    """
    text = _STYLE.sub("", _COLOR.sub("", text)).replace("~", " ")
    while True:
        lead = _LEAD_IN.match(text)
        shorter = (text[lead.end() :] if lead else text).rstrip(_END)
        for end in _LATEX_ENDS:
            shorter = shorter.removesuffix(end)
        if outer := _OUTER.fullmatch(shorter):
            shorter = next(group for group in outer.groups() if group is not None)
        if shorter == text:
            return text.strip()
        text = shorter


def number_in_words(text: str, *, units: frozenset[str] = frozenset()) -> Decimal | None:
    """The number of a text that has one, alone or with words and units; None otherwise.

    So `12 dollars`, `$12`, `1/2 cup` and `(A) 12` are numbers; `x^2`, `5 to 7`, `(1, 2)`, a date, a
    percentage and `2x` are not. `units` are single letters that are units: elsewhere `2 m` may be
    a product.
    """
    plain = _GAP.sub(" ", _TEXT.sub(r" \1 ", text)).replace("\\$", "$").replace("{,}", ",")
    if bracketed := _BRACKETED.fullmatch(plain):
        plain = bracketed[1]
    found = split_number(_LABEL.sub(" ", plain).strip().removeprefix("+"))
    if found is None:
        return None
    before, number, after = found
    attached = re.match(r"[A-Za-z]+", after)
    if attached and not _is_unit(attached[0], units):
        return None
    if before[-1:].isalnum() or not all(map(_WORDS.fullmatch, (before, after))):
        return None
    words = re.findall("[A-Za-z]+", f"{before} {after}")
    return number if all(_is_word(word, units) for word in words) else None


def _is_unit(word: str, units: frozenset[str]) -> bool:
    return word in units or _SHORT.fullmatch(word) is not None


def _is_word(word: str, units: frozenset[str]) -> bool:
    return _is_unit(word, units) or (len(word) > 2 and not _FUNCTION.fullmatch(word))
