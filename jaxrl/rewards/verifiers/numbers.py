r"""Numbers in text: 1,234 and -5, $0.50, 1e-5, 2 \times 10^{3}, 5 million, 3/4 and 1 1/2.

Numbers are compared as numbers: `same_number` has the tolerance of every built-in reward.
"""

import collections
import re
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal, localcontext

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]++)(?:\.[0-9]++)?|\.[0-9]++"
_POWER = r"10(?:\^|\*\*)\{?"
# A minus sign counts only if no digit, letter or bracket precedes it: "10-3" has 10 and 3.
_NUMBER = re.compile(
    r"(?:(?<![0-9A-Za-z)\]])(?P<minus>-)\$?)?(?:"
    # a fraction, but no date: 3/4, 1 1/2
    r"(?<![0-9/])(?:(?P<whole>[0-9]++) )?(?P<over>[0-9]++)/(?P<under>0*+[1-9][0-9]*+)(?![./]?[0-9])"
    r"|(?<![0-9.,])" + _POWER + r"(?P<power>[+-]?[0-9]{1,9})\}?(?![0-9])"
    r"|(?P<digits>" + _DIGITS + r")"
    r"(?:[eE](?P<e>[+-]?[0-9]{1,9})(?![0-9A-Za-z])"
    r"| ?(?:\\times|\\cdot|\u00d7|\*|x) ?" + _POWER + r"(?P<times>[+-]?[0-9]{1,9})\}?(?![0-9]))?"
    r"(?: (?P<scale>hundred|thousand|million|billion|trillion)(?![A-Za-z]))?)"
)
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_FRACTION = re.compile(r"(?<=([0-9]))?\\[dtc]?frac(?:\{([0-9]+)\}\{([0-9]+)\}|([0-9])([0-9]))")
_THOUSANDS = re.compile(r"(?<=[0-9])(?:\{,\}|,\\!|\\,)(?=[0-9]{3})")
_MAX_WRITTEN = 30  # digits that an exponent adds when it is written out
# Wide enough for every number of 60 digits; without traps a result out of range is no error
_WIDE = Context(prec=60, Emax=MAX_EMAX, Emin=MIN_EMIN, traps=[])
_TOLERANCE = Decimal("1e-6")
_SMALL = Decimal("1e-5")  # of the number itself, below 0.1
_FLOAT32 = Decimal("6e-8")  # of a number with a fraction: a column of float32 is so exact


def last_number_of(text: str) -> Decimal | None:
    """The last number in a text, or None."""
    last = collections.deque(_NUMBER.finditer(_plain(text)), maxlen=1)
    return _value(last[0]) if last else None


def last_number_after(mark: re.Pattern[str], text: str) -> Decimal | None:
    """The number that follows the last mark that a number follows, or None."""
    text = _plain(text)
    found = None
    for match in mark.finditer(text):
        found = _NUMBER.match(text, match.end()) or found
    return _value(found) if found else None


def split_number(text: str) -> tuple[str, Decimal, str] | None:
    """(text before it, number, text after it) of a text with exactly one number, or None."""
    text = _plain(text)
    matches = _NUMBER.finditer(text)
    match = next(matches, None)
    if match is None or next(matches, None) is not None:
        return None
    return text[: match.start()], _value(match), text[match.end() :]


def whole_number(text: str) -> Decimal | None:
    """The number that a text is, or None."""
    found = split_number(text.strip().removeprefix("+"))
    return found[1] if found and not found[0] and not found[2] else None


def same_number(a: Decimal, b: Decimal) -> bool:
    """Whether two numbers are equal: 51.0 equals 51, and 0.333333 equals 1/3.

    The tolerance is 1e-6, of numbers below 0.1 1e-5 of the number. A large `b` with a fraction
    has 6e-8 of itself, the precision of float32. So integers are compared exactly.
    """
    if a == b:
        return True
    with localcontext(_WIDE):
        size = max(abs(a), abs(b))
        tolerance = min(_TOLERANCE, _SMALL * size)
        if b != b.to_integral_value():
            tolerance = max(tolerance, _FLOAT32 * abs(b))
        return abs(a - b) <= tolerance


def write_exponents_out(text: str) -> str:
    """The text with 1e5 as 100000 and 5e-3 as 0.005."""

    def plain(match: re.Match[str]) -> str:
        if match["e"] is None or abs(int(match["e"])) > _MAX_WRITTEN:
            return match[0]
        return format(_value(match), "f")

    return _NUMBER.sub(plain, text)


def decimal_text(value: float) -> str:
    """The shortest digits of a float without an exponent: 42, 0.00001, 15000000000000000."""
    return format(Decimal(repr(value)), "f").removesuffix(".0")


def _plain(text: str) -> str:
    """Writes minus signs, thousands and simple fractions of LaTeX as plain text."""
    text = text.replace("\N{MINUS SIGN}", "-")
    if "\\" not in text and "{" not in text:
        return text
    return _FRACTION.sub(_plain_fraction, _THOUSANDS.sub(",", text))


def _plain_fraction(match: re.Match[str]) -> str:
    before, *digits = match.groups()
    over, under = filter(None, digits)
    return f"{' ' if before else ''}{over}/{under}"


def _value(match: re.Match[str]) -> Decimal:
    with localcontext(_WIDE):
        if match["under"]:
            value = Decimal(match["whole"] or 0) + Decimal(match["over"]) / Decimal(match["under"])
        elif match["power"]:
            value = Decimal(f"1e{match['power']}")
        else:
            exponent = match["e"] or match["times"] or 0
            value = Decimal(f"{match['digits'].replace(',', '')}e{exponent}")
            value *= Decimal(10) ** _SCALES.get(match["scale"], 0)
        return value.copy_negate() if match["minus"] else value
