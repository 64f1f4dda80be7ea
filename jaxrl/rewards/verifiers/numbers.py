"""Finds numbers in text: 1,234 and -5 and $0.50 and the 12 in "it is 12."."""

import re
from decimal import Decimal

# A minus sign counts only if no digit, letter or bracket precedes it: "10-3" has 10 and 3.
_NUMBER = re.compile(
    r"(?:(?<![0-9A-Za-z)\]])(?P<minus>-)\$?)?"
    r"(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
)
_TOLERANCE = Decimal("1e-6")


def find_numbers(text: str) -> list[Decimal]:
    """All numbers in a text, in order; thousands separators are removed."""
    text = text.replace("\N{MINUS SIGN}", "-")
    return [
        Decimal((m["minus"] or "") + m["digits"].replace(",", "")) for m in _NUMBER.finditer(text)
    ]


def last_number_of(text: str) -> Decimal | None:
    numbers = find_numbers(text)
    return numbers[-1] if numbers else None


def same_number(a: Decimal, b: Decimal) -> bool:
    """Equality up to 1e-6: 51.0 equals 51, and long integers are exact."""
    return abs(a - b) <= _TOLERANCE
