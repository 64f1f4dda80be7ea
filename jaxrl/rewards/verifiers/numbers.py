"""Numbers in prose: 1,234 and -5 and $0.50 and the 12 of "it is 12."."""

import re
from decimal import Decimal

# A minus sign counts where no digit, letter or bracket precedes it: "10-3" holds 10 and 3.
_NUMBER = re.compile(
    r"(?:(?<![0-9A-Za-z)\]])(?P<minus>-)\$?)?"
    r"(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
)
_TOLERANCE = Decimal("1e-6")


def find_numbers(text: str) -> list[Decimal]:
    """All numbers of a text in order, thousands separators removed."""
    text = text.replace("\N{MINUS SIGN}", "-")
    return [
        Decimal((m["minus"] or "") + m["digits"].replace(",", "")) for m in _NUMBER.finditer(text)
    ]


def last_number_of(text: str) -> Decimal | None:
    numbers = find_numbers(text)
    return numbers[-1] if numbers else None


def same_number(a: Decimal, b: Decimal) -> bool:
    """Equal to 1e-6, so that 51.0 is 51 and long integers stay exact."""
    return abs(a - b) <= _TOLERANCE
