"""Conditions of a shell script: `[ ... ]` and `[[ ... ]]`, as far as their words are known."""

import fnmatch
import operator
import re
from collections.abc import Sequence

from jaxrl.migrate.shell_expansion import causes

NUMBERS = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}


def truth(words: Sequence[str]) -> tuple[bool | None, tuple[str, ...]]:
    """Whether a condition holds, and the names that decide it if that is not known (None)."""
    for connectors, decisive in ((("||", "-o"), True), (("&&", "-a"), False)):
        for at, word in enumerate(words):
            if word in connectors and 0 < at < len(words) - 1:
                first, first_names = truth(words[:at])
                second, second_names = truth(words[at + 1 :])
                if decisive in (first, second):
                    return decisive, ()
                unknown = first is None or second is None
                return None if unknown else not decisive, first_names + second_names
    if words and words[0] == "!":
        result, names = truth(words[1:])
        return None if result is None else not result, names
    if words and words[0] == "(" and words[-1] == ")":
        return truth(words[1:-1])
    names = tuple(name for word in words for name in causes(word))
    if names:
        return None, names
    return _known(words), ()


def _known(words: Sequence[str]) -> bool | None:
    """A condition without connectors whose words are all known."""
    match list(words):
        case []:
            return False
        case [word]:
            return bool(word)
        case ["-z", word]:
            return not word
        case ["-n", word]:
            return bool(word)
        case [left, "=" | "==", right]:
            return matches(left, right)
        case [left, "!=", right]:
            return not matches(left, right)
        case [left, "=~", right]:
            return re.search(right, left) is not None
        case [left, name, right] if name in NUMBERS and _is_integer(left) and _is_integer(right):
            return NUMBERS[name](int(left), int(right))
    return None


def matches(text: str, pattern: str) -> bool:
    """Whether a shell pattern (`*`, `?`, `[...]`) matches the whole text."""
    return text == pattern or fnmatch.fnmatchcase(text, pattern)


def _is_integer(text: str) -> bool:
    return re.fullmatch(r"[+-]?\d+", text.strip()) is not None
