"""Options of a named function, as in "last_number?require_stop=false&tolerance=0.1"."""

import ast
from typing import Any


def options(spec: str) -> dict[str, Any]:
    """The keyword arguments after "?", joined by "&".

    true, false, numbers and quoted text are read as Python literals, everything else as text.
    """
    query = spec.partition("?")[2]
    pairs = [option.partition("=") for option in query.split("&") if option]
    return {name: _literal(value) for name, _, value in pairs}


def _literal(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
