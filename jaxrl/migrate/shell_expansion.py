"""Expansion of the words of a shell script: quotes, variables, arrays, arithmetic.

What only a run would give is a mark in the text: `mark(name)`, with the name of the variable or the
command. `causes(text)` lists the names.
"""

import ast
import fnmatch
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from jaxrl.migrate.shell_syntax import end_of_expansion, end_of_quote

PARAMETER = re.compile(
    r"(?P<indirect>!?)(?P<count>#?)(?P<name>[A-Za-z_]\w*|\d+|[@*])(?P<index>\[[^]]*\])?(?P<rest>.*)",
    re.DOTALL,
)
MARK = re.compile("\ue000(.*?)\ue001", re.DOTALL)
UNSET = "is not set"


def mark(name: str) -> str:
    """The text that stands for the unknown value of a variable or command."""
    return f"\ue000{name}\ue001"


def causes(text: str) -> tuple[str, ...]:
    """The names whose values a text needs and does not have."""
    return tuple(dict.fromkeys(MARK.findall(text)))


def shown(text: str) -> str:
    """A text with its marks written as a shell would write them."""
    return MARK.sub(lambda m: m[1] if m[1].startswith("$") else f"${{{m[1]}}}", text)


class Expander:
    """The variables and arguments of a script, and the expansion of its raw words."""

    def __init__(self, variables: Mapping[str, str], arguments: Sequence[str] | None):
        self.variables: dict[str, str | list[str]] = dict(variables)
        self.arguments = None if arguments is None else list(arguments)
        self.reasons: dict[str, str] = {}
        self.unknown: tuple[str, ...] = ()  # names that the last condition lacked

    def copy_of_variables(self) -> dict[str, str | list[str]]:
        return {
            name: list(value) if isinstance(value, list) else value
            for name, value in self.variables.items()
        }

    def assign(self, name: str, value: str, line: int) -> None:
        """Sets a variable. The output of a command becomes the variable's own mark."""
        if any(cause.startswith("$(") for cause in causes(value)):
            self.reasons[name] = f"line {line}: {shown(value)}, which only a run can evaluate"
            value = mark(name)
        self.variables[name] = value

    def shift(self, n: int) -> None:
        if self.arguments is not None:
            self.arguments = self.arguments[n:]

    def text(self, raw: str, *, unset: str | None = None) -> str:
        """The value of a word that is not split, as in an assignment."""
        return " ".join(self.fields(raw, unset=unset, split=False))

    def fields(self, raw: str, *, unset: str | None = None, split: bool = True) -> list[str]:
        """The words that a raw word becomes. `unset` is the value of a variable that is not set."""
        fields: list[str] = []
        current: str | None = None
        for text, quoted in self._pieces(raw, unset, in_quotes=False):
            if isinstance(text, list):  # "${ARRAY[@]}": one word for each item
                for at, item in enumerate(text):
                    if at and current is not None:
                        fields.append(current)
                        current = None
                    current = (current or "") + item
            elif quoted or not split:
                current = (current or "") + text
            else:
                words = text.split()
                if text[:1].isspace() and current is not None:
                    fields.append(current)
                    current = None
                for at, word in enumerate(words):
                    if at and current is not None:
                        fields.append(current)
                        current = None
                    current = (current or "") + word
                if words and text[-1:].isspace() and current is not None:
                    fields.append(current)
                    current = None
        return fields if current is None else [*fields, current]

    def _pieces(
        self, raw: str, unset: str | None, *, in_quotes: bool
    ) -> Iterator[tuple[str | list[str], bool]]:
        """(text, whether it is quoted) of each part of a raw word; a list is `"${A[@]}"`."""
        at = 0
        if (
            not in_quotes
            and re.match(r"~(/|$)", raw)
            and isinstance(self.variables.get("HOME"), str)
        ):
            yield str(self.variables["HOME"]), True
            at = 1
        while at < len(raw):
            char = raw[at]
            if char == "\\" and (not in_quotes or raw[at + 1 : at + 2] in '$`"\\\n'):
                yield raw[at + 1 : at + 2].replace("\n", ""), True
                at += 2
            elif char == "'" and not in_quotes:
                end = end_of_quote(raw, at)
                yield raw[at + 1 : end - 1], True
                at = end
            elif char == '"' and not in_quotes:
                end = end_of_quote(raw, at)
                inner = raw[at + 1 : end - 1]
                if not inner:
                    yield "", True
                yield from self._pieces(inner, unset, in_quotes=True)
                at = end
            elif char == "`":
                end = raw.find("`", at + 1) + 1 or len(raw)
                yield mark(f"$({raw[at + 1 : end - 1]})"), True
                at = end
            elif char == "$" and raw[at + 1 : at + 2] in ("'", '"') and not in_quotes:
                at += 1
            elif char == "$" and (end := end_of_expansion(raw, at)) > at + 1:
                value = self._value(raw[at:end], unset)
                if isinstance(value, list) and not in_quotes:
                    value = " ".join(value)
                yield value, in_quotes
                at = end
            else:
                end = at + 1
                while end < len(raw) and raw[end] not in "\\'\"`$":
                    end += 1
                yield raw[at:end], True
                at = end

    def _value(self, expansion: str, unset: str | None) -> str | list[str]:
        """The value of `$...`; a list for all items of an array or all arguments."""
        if expansion.startswith("$((") and expansion.endswith("))"):
            return self.arithmetic(expansion[3:-2], unset=unset)
        if expansion.startswith("$("):
            return mark(expansion)
        inner = expansion[2:-1] if expansion.startswith("${") else expansion[1:]
        if inner == "#":
            return mark("#") if self.arguments is None else str(len(self.arguments))
        match = PARAMETER.fullmatch(inner)
        if match is None:
            return mark(expansion)
        return self._parameter(match, unset)

    def _parameter(self, match: re.Match, unset: str | None) -> str | list[str]:
        name, index, rest = match["name"], match["index"], match["rest"]
        if match["indirect"]:
            name = self._lookup(name)
            if not isinstance(name, str) or causes(name):
                return mark(match["name"])
        is_all = name in "@*" or index in ("[@]", "[*]")
        value = self._lookup(name)
        if is_all:
            items = value if isinstance(value, list) else [] if value is None else [value]
            if match["count"]:
                return str(len(items))
            if not items and rest[:1] in (":", "-") and rest.lstrip(":").startswith("-"):
                return self.text(f'"{rest.lstrip(":")[1:]}"', unset=unset)
            return items
        if isinstance(value, list):
            at = index[1:-1] if index else "0"
            in_range = re.fullmatch(r"-?\d+", at) and -len(value) <= int(at) < len(value)
            value = value[int(at)] if in_range else None
        if match["count"]:
            return str(len(value or "")) if not causes(value or "") else value or ""
        return self._operation(name, value, rest, unset)

    def _operation(self, name: str, value: str | None, rest: str, unset: str | None) -> str:
        """`${NAME<rest>}`, such as `:-default` and `%.yaml`."""
        operation = re.match(r":?[-=+?]", rest)
        if operation:
            kind, word = operation[0], rest[operation.end() :]
            missing = value is None or (":" in kind and value == "")
            if kind[-1] == "+":
                return "" if missing else self.text(word, unset=unset)
            if not missing:
                return value or ""
            if kind[-1] == "?":
                return self._unset(name, None)
            default = self.text(word, unset=unset)
            if kind[-1] == "=":
                self.variables[name] = default
            return default
        if value is None:
            return self._unset(name, unset)
        if not rest or causes(value):
            return value
        return _edited(value, rest, lambda word: self.text(word, unset=unset))

    def _unset(self, name: str, unset: str | None) -> str:
        if unset is not None:
            return unset
        argument = "an argument of the script, which is not given"
        self.reasons.setdefault(name, argument if name.isdigit() else UNSET)
        return mark(name)

    def _lookup(self, name: str) -> str | list[str] | None:
        if name in "@*":
            return self.arguments or []
        if name.isdigit():
            if name == "0":
                return "script"
            given = self.arguments or []
            if int(name) <= len(given):
                return given[int(name) - 1]
            return "" if self.arguments is not None else None
        return self.variables.get(name)

    def arithmetic(self, expression: str, *, unset: str | None = None) -> str:
        """The integer value of an expression, or the marks of what it lacks."""
        expanded = self.text(f'"{expression}"', unset=unset)
        unknown = list(causes(expanded))

        def number(match: re.Match) -> str:
            value = self.variables.get(match[0])
            text = value if isinstance(value, str) else self._unset(match[0], unset)
            if names := causes(text):
                unknown.extend(names)
                return "0"
            return f"({text or 0})" if re.fullmatch(r"[\d\s+*/()%-]*", text) else "x"

        python = re.sub(r"[A-Za-z_]\w*", number, MARK.sub("0", expanded))
        if unknown:
            return "".join(map(mark, dict.fromkeys(unknown)))
        python = python.replace("&&", " and ").replace("||", " or ")
        python = re.sub(r"!(?!=)", " not ", python)
        try:
            return str(int(_calculate(ast.parse(python.strip(), mode="eval").body)))
        except (SyntaxError, ValueError, ZeroDivisionError, OverflowError):
            return mark(f"$(({expression}))")


def _edited(value: str, rest: str, expand: Callable[[str], str]) -> str:
    """`${X%pattern}`, `${X#pattern}`, `${X/old/new}`, `${X^^}`, `${X,,}`, `${X:start:length}`."""
    if rest in ("^^", ",,"):
        return value.upper() if rest == "^^" else value.lower()
    if match := re.fullmatch(r"(%%?|##?)(.*)", rest, re.DOTALL):
        kind, pattern = match[1], expand(match[2])
        lengths = range(len(value) + 1)
        for n in lengths if len(kind) == 1 else reversed(lengths):
            end = len(value) - n
            part, kept = (value[end:], value[:end]) if kind[0] == "%" else (value[:n], value[n:])
            if fnmatch.fnmatchcase(part, pattern):
                return kept
        return value
    if match := re.fullmatch(r"/(/?)([^/]+)(?:/(.*))?", rest, re.DOTALL):
        old, new = expand(match[2]), expand(match[3] or "")
        return value.replace(old, new, -1 if match[1] else 1)
    if match := re.fullmatch(r":\s*(\d+)(?::(\d+))?", rest):
        start = int(match[1])
        return value[start : start + int(match[2])] if match[2] else value[start:]
    return mark(f"$({rest})")


BINARY = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Mod: lambda a, b: a - b * int(a / b),
    ast.Div: lambda a, b: int(a / b),  # towards zero, as in C
    ast.Pow: operator.pow,
}
COMPARISONS = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def _calculate(node: ast.expr) -> int:
    """Raises ValueError for what is not integer arithmetic."""
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.BinOp(left, op, right) if type(op) in BINARY:
            power = isinstance(op, ast.Pow)
            a, b = _calculate(left), _calculate(right)
            if power and not 0 <= b < 64:
                raise ValueError("a power that is too large")
            return BINARY[type(op)](a, b)
        case ast.UnaryOp(ast.USub(), operand):
            return -_calculate(operand)
        case ast.UnaryOp(ast.Not(), operand):
            return not _calculate(operand)
        case ast.Compare(left, [op], [right]) if type(op) in COMPARISONS:
            return COMPARISONS[type(op)](_calculate(left), _calculate(right))
        case ast.BoolOp(op, values):
            results = [_calculate(value) for value in values]
            return all(results) if isinstance(op, ast.And) else any(results)
    raise ValueError("not integer arithmetic")
