"""Options of a named function, as in "last_number?require_stop=false&tolerance=0.1"."""

import ast
from typing import Any

from jaxrl.config.schema import convert, did_you_mean, keys, out_of_range


def options(spec: str) -> dict[str, Any]:
    """The keyword arguments after "?", joined by "&".

    true, false, numbers and quoted text are read as Python literals, everything else as text.
    """
    query = spec.partition("?")[2]
    pairs = [option.partition("=") for option in query.split("&") if option]
    return {name: _literal(value) for name, _, value in pairs}


def read_options[T](schema: type[T], spec: str, no_options: str = "none") -> tuple[T, list[str]]:
    """(options of "NAME?OPTION=VALUE&..." as the dataclass `schema`, one line per invalid option).

    `no_options` is what the message lists if the schema has none.
    """
    known, used, errors = keys(schema), {}, []
    for option, value in options(spec).items():
        if option not in known:
            hint = did_you_mean(option, known)
            listed = ", ".join(known) or no_options
            errors.append(
                f"{spec!r} has the unknown option {option!r}; {hint}the options of "
                f"{spec.partition('?')[0]} are {listed}"
            )
            continue
        try:
            used[option] = convert(value, known[option])
            wrong = out_of_range(used[option], known[option])
        except ValueError as wrong_type:
            wrong = [str(wrong_type)]
        errors += [f"{spec!r}: {line}" for line in wrong]
    return (schema() if errors else schema(**used)), errors


def _literal(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
