"""Commands of a launch script with their variables replaced; the script is not run.

    evaluate(text, environment={"HOME": "/home/me"}, given={"DEVICE": "gpu"}, arguments=("8",))

A part of a value that only a run would give (the output of a command, a variable that is not set, a
value that depends on a condition that is not known) is a mark with the name of its variable:
`causes` lists the names in a text, and `EvaluatedScript.reasons` says why each is not known.
"""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from jaxrl.migrate.shell_expansion import Expander, causes, mark
from jaxrl.migrate.shell_syntax import ASSIGNMENT, Block, Branches, Command, Token, parse
from jaxrl.migrate.shell_tests import matches, truth

DECLARATIONS = ("export", "declare", "local", "readonly", "typeset")
SILENT = ("echo", "printf", "cd", "mkdir", "ulimit", "sleep", "wait", "trap", "pushd", "popd")
TESTS = ("[", "[[", "test", "!")
MAX_ITERATIONS = 1000


@dataclasses.dataclass(frozen=True)
class Invocation:
    """A command that the script runs."""

    words: tuple[str, ...]
    line: int
    depends_on: tuple[str, ...]  # names that decide whether it runs


@dataclasses.dataclass(frozen=True)
class EvaluatedScript:
    runs: tuple[Invocation, ...]
    reasons: Mapping[str, str]  # why a name is not known


def evaluate(
    text: str,
    *,
    environment: Mapping[str, str],
    given: Mapping[str, str] | None = None,
    arguments: Sequence[str] | None = None,
) -> EvaluatedScript:
    """The commands of a script.

    Args:
      text: the script.
      environment: variables that are set before it starts.
      given: variables whose assignments in the script are ignored.
      arguments: of the script; None = not known, `$@` is empty then.

    Raises ValueError with a line number for a script that cannot be read.
    """
    script = _Script(environment, dict(given or {}), arguments)
    with contextlib.suppress(_Exit):
        script.run(parse(text))
    return EvaluatedScript(tuple(script.runs), script.reasons)


class _Exit(Exception):
    """The script ends, or the branch that is tried."""


class _Script(Expander):
    def __init__(
        self,
        environment: Mapping[str, str],
        given: dict[str, str],
        arguments: Sequence[str] | None,
    ):
        super().__init__({**environment, **given}, arguments)
        self._given = given
        self._depends_on: tuple[str, ...] = ()
        self.runs: list[Invocation] = []

    def run(self, statements: Sequence) -> bool | None:
        """Whether the last statement succeeds; None = not known."""
        status, connector = True, ""
        for statement in statements:
            if connector in ("&&", "||") and status is None:
                names = self.unknown
                self._try([lambda s=statement: self._statement(s), lambda: None], _line(statement))
                self.unknown = names
            elif connector not in ("&&", "||") or status is (connector == "&&"):
                status = self._statement(statement)
            connector = getattr(statement, "connector", "")
            if status is None and connector in ("&&", "||") and not _is_test(statement):
                status = True  # a script's commands are expected to succeed
        return status

    def _statement(self, statement) -> bool | None:
        match statement:
            case Command():
                return self._command(statement.tokens)
            case Branches():
                self._branches(statement)
            case Block(variable="", condition=()):
                return self.run(statement.body)
            case Block():
                self._loop(statement)
        return True

    def _branches(self, statement: Branches) -> None:
        """Runs the branch that is taken, or tries all that may be."""
        possible: list[Callable[[], object]] = []
        for condition, body in statement.choices:
            holds = self._holds(statement.subject, condition)
            if holds is not False:
                possible.append(lambda body=body: self.run(body))
            if holds:
                break
        else:
            possible.append(lambda: None)
        if len(possible) == 1:
            possible[0]()
        else:
            self._try(possible, statement.line)

    def _holds(self, subject: Token | None, condition: Sequence) -> bool | None:
        if subject is None:
            return self.run(condition) if condition else True
        value = self.text(subject.text, unset="")
        if names := causes(value):
            self.unknown = names
            return None
        return any(matches(value, self.text(pattern.text)) for pattern in condition)

    def _loop(self, statement: Block) -> None:
        if statement.variable:
            words = [word for raw in statement.words for word in self.fields(raw)]
            if any(causes(word) for word in words):
                self.unknown = tuple(name for word in words for name in causes(word))
                self._try([lambda: self.run(statement.body), lambda: None], statement.line)
                return
            for word in words[:MAX_ITERATIONS]:
                self.assign(statement.variable, word, statement.line)
                self.run(statement.body)
            return
        for _ in range(MAX_ITERATIONS):
            holds = self.run(statement.condition)
            if holds is None:
                self._try([lambda: self.run(statement.body), lambda: None], statement.line)
            if not holds:
                return
            self.run(statement.body)

    def _try(self, alternatives: Sequence[Callable[[], object]], line: int) -> None:
        """Runs each alternative on a copy of the variables, and marks what differs after them."""
        names = tuple(dict.fromkeys(self.unknown)) or (f"line {line}",)
        if not self.unknown:
            self.reasons.setdefault(f"line {line}", "a condition that only a run can evaluate")
        before, depends_on, ends = self.copy_of_variables(), self._depends_on, []
        self._depends_on = depends_on + names
        for alternative in alternatives:
            self.variables = {
                name: list(value) if isinstance(value, list) else value
                for name, value in before.items()
            }
            with contextlib.suppress(_Exit):
                alternative()
                ends.append(self.variables)
        self._depends_on, self.unknown = depends_on, ()
        if not ends:
            raise _Exit
        self.variables = _merged(ends, names)

    def _command(self, tokens: Sequence[Token]) -> bool | None:
        words, heredoc = [t for t in tokens if t.heredoc is None], ""
        for token in tokens:
            heredoc = token.heredoc[0] if token.heredoc else heredoc
        line = tokens[0].line
        n_assignments = 0
        while n_assignments < len(words) and ASSIGNMENT.match(words[n_assignments].text):
            n_assignments += 1
        if n_assignments == len(words):
            for token in words:
                self._assign(token)
            return True
        if words[n_assignments].text in DECLARATIONS:
            for token in words[n_assignments + 1 :]:
                if ASSIGNMENT.match(token.text):
                    self._assign(token)
            return True
        return self._simple([token.text for token in words[n_assignments:]], heredoc, line)

    def _assign(self, token: Token) -> None:
        match = ASSIGNMENT.match(token.text)
        assert match is not None
        name, appends = match[1], match[2] == "+"
        if name in self._given:
            return
        old = self.variables.get(name)
        if token.array is not None:
            items = [word for raw in token.array for word in self.fields(raw)]
            start = old if isinstance(old, list) else [old] if old else []
            self.variables[name] = [*start, *items] if appends else items
            return
        value = self.text(token.text[match.end() :])
        if appends:
            value = (old if isinstance(old, str) else "") + value
        self.assign(name, value, token.line)

    def _simple(self, raw: list[str], heredoc: str, line: int) -> bool | None:
        """Runs a command after its assignments; returns whether it succeeds, if that is known."""
        name = raw[0]
        if name == "!":
            status = self._simple(raw[1:], heredoc, line) if len(raw) > 1 else True
            return None if status is None else not status
        if name in TESTS or name.startswith("(("):
            return self._test(raw)
        words = [word for text in raw for word in self.fields(text)]
        if not words or name in (":", "true"):
            return True
        match words[0]:
            case "false":
                return False
            case "exit" | "return" | "exec" if words[0] != "exec" or len(words) > 1:
                if words[0] == "exec":
                    self._record(words[1:], line)
                raise _Exit
            case "shift":
                self.shift(int(words[1]) if words[1:] and words[1].isdigit() else 1)
            case "unset":
                for variable in words[1:]:
                    self.variables.pop(variable, None)
            case "set" if "--" in words:
                self.arguments = words[words.index("--") + 1 :]
            case "read":
                self.assign(words[-1], self.text(heredoc) if heredoc else mark("$(read)"), line)
            case _:
                self._record(words, line)
                return None if words[0] not in SILENT else True
        return True

    def _record(self, words: list[str], line: int) -> None:
        """Adds a command; the text of `bash -c TEXT` is run itself."""
        for at, word in enumerate(words[:-2]):
            if re.fullmatch(r"(.*/)?(ba)?sh", word) and re.fullmatch(r"-l?c", words[at + 1]):
                with contextlib.suppress(_Exit):
                    self.run(parse(words[at + 2]))
                return
        self.runs.append(Invocation(tuple(words), line, self._depends_on))

    def _test(self, raw: list[str]) -> bool | None:
        if raw[0].startswith("(("):
            value = self.arithmetic(raw[0][2:-2], unset="0")
            result = None if causes(value) else value != "0"
            self.unknown = causes(value)
            return result
        end = -1 if raw[-1] in ("]", "]]") else len(raw)
        words = []
        for text in raw[1:end]:
            if raw[0] == "[[":
                words.append(self.text(text, unset=""))
            else:
                words += self.fields(text, unset="")
        result, self.unknown = truth(words)
        return result


def _is_test(statement) -> bool:
    return not isinstance(statement, Command) or statement.tokens[0].text in TESTS


def _line(statement: Command | Branches | Block) -> int:
    return statement.tokens[0].line if isinstance(statement, Command) else statement.line


def _merged(ends: list[dict[str, str | list[str]]], names: Sequence[str]) -> dict:
    """The variables after one of several branches: what differs is marked with `names`."""
    marks, merged = "".join(map(mark, names)), {}
    for name in dict.fromkeys(name for end in ends for name in end):
        values = [end.get(name) for end in ends]
        if all(value == values[0] for value in values):
            merged[name] = values[0]
        elif any(isinstance(value, list) for value in values):
            merged[name] = list(_merged_words([_as_list(value) for value in values], marks))
        else:
            merged[name] = marks
    return merged


def _merged_words(values: list[list[str]], marks: str) -> Iterator[str]:
    """Words that every array has, and the others with `marks` after their text."""
    for word in dict.fromkeys(word for value in values for word in value):
        yield word if all(word in value for value in values) else word + marks


def _as_list(value: str | list[str] | None) -> list[str]:
    return value if isinstance(value, list) else [value] if value else []
