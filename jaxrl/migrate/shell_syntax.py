"""The commands of a shell script, as a tree; nothing is run.

Covers the part of Bash that launch scripts use: assignments and arrays, continuations, quotes,
here-documents, redirections (skipped), `if`, `case`, loops, groups and functions.
"""

import dataclasses
import re

OPERATORS = ("&&", "||", ";;", ";", "|&", "|", "&", "(", ")", "\n")
REDIRECTION = re.compile(r"\d*(&>>|&>|<<<|<<-?|>>|>&|<&|>\||>|<)&?")
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[[^]]*\])?(\+?)=")
CLOSERS = {"(": ")", "{": "}"}


@dataclasses.dataclass(frozen=True)
class Token:
    text: str
    line: int
    is_operator: bool = False
    array: tuple[str, ...] | None = None  # the raw words of NAME=( ... ); text is "NAME=" then
    heredoc: list[str] | None = None  # its text, in double quotes unless the delimiter is quoted


@dataclasses.dataclass(frozen=True)
class Command:
    """A simple command: raw words, assignments first."""

    tokens: tuple[Token, ...]
    connector: str  # the operator after it


@dataclasses.dataclass(frozen=True)
class Branches:
    """`if` and `case`: (patterns or condition, body) pairs, in order."""

    subject: Token | None  # of case
    choices: tuple[tuple[tuple, tuple], ...]
    line: int


@dataclasses.dataclass(frozen=True)
class Block:
    """A loop, or a group or subshell, which has neither a condition nor a variable."""

    body: tuple
    line: int
    connector: str = ""
    condition: tuple = ()  # of while
    variable: str = ""  # of for
    words: tuple[str, ...] = ()  # raw, of for


def parse(text: str) -> tuple:
    """The statements of a script. Raises ValueError with a line number for what is not Bash."""
    return _ScriptParser(tokenize(text.replace("\r\n", "\n"))).statements(())


def tokenize(text: str) -> list[Token]:
    """Words and operators, without comments, redirections and here-documents."""
    return _ScriptLexer(text).tokens()


def end_of_expansion(text: str, start: int) -> int:
    """The position after the `$...` that begins at `start`."""
    after = text[start + 1 : start + 2]
    if after in CLOSERS:
        return _matching(text, start + 1)
    match = re.compile(r"\w[\w]*|[@*#?$!-]").match(text, start + 1)
    if match and match[0][0].isdigit():
        return start + 2
    return match.end() if match else start + 1


def _matching(text: str, start: int) -> int:
    """The position after the bracket that closes the one at `start`, over quotes and nesting."""
    opener, closer, depth, at = text[start], CLOSERS[text[start]], 0, start
    while at < len(text):
        char = text[at]
        if char == "\\":
            at += 1
        elif char in "'\"":
            at = end_of_quote(text, at) - 1
        elif char == opener:
            depth += 1
        elif char == closer:
            depth -= 1
            if depth == 0:
                return at + 1
        at += 1
    raise ValueError(f"line {line_of(text, start)}: {opener} is never closed")


def end_of_quote(text: str, start: int) -> int:
    """The position after the quoted part that begins at `start`."""
    quote, at = text[start], start + 1
    while at < len(text):
        if text[at] == quote:
            return at + 1
        if quote == '"' and text[at] == "\\":
            at += 1
        elif quote == '"' and text.startswith(("$(", "${"), at):
            at = end_of_expansion(text, at) - 1
        at += 1
    raise ValueError(f"line {line_of(text, start)}: {quote} is never closed")


def line_of(text: str, at: int) -> int:
    return text.count("\n", 0, at) + 1


class _ScriptLexer:
    def __init__(self, text: str):
        self._text, self._at = text, 0
        self._heredocs: list[tuple[str, list[str]]] = []  # delimiter, and where the text goes

    def tokens(self) -> list[Token]:
        found = []
        while (token := self._next()) is not None:
            found.append(token)
        return found

    def _next(self) -> Token | None:
        text = self._text
        while self._at < len(text):
            char = text[self._at]
            if text.startswith("\\\n", self._at):
                self._at += 2
            elif char in " \t":
                self._at += 1
            elif char == "#":
                self._at = self._end_of_line()
            elif char == "\n":
                line = line_of(text, self._at)
                self._at += 1
                self._skip_heredocs()
                return Token("\n", line, is_operator=True)
            elif match := REDIRECTION.match(text, self._at):
                if (heredoc := self._redirection(match)) is not None:
                    return heredoc
            elif operator := next((o for o in OPERATORS if text.startswith(o, self._at)), None):
                if operator == "(" and text.startswith("((", self._at):
                    return self._arithmetic()
                self._at += len(operator)
                return Token(operator, line_of(text, self._at), is_operator=True)
            else:
                return self._word()
        return None

    def _end_of_line(self) -> int:
        end = self._text.find("\n", self._at)
        return len(self._text) if end < 0 else end

    def _redirection(self, match: re.Match) -> Token | None:
        line, self._at = line_of(self._text, match.start()), match.end()
        while self._text[self._at : self._at + 1] in (" ", "\t"):
            self._at += 1
        target = self._word().text if self._at < len(self._text) else ""
        if match[1] not in ("<<", "<<-"):
            return None
        content: list[str] = []
        self._heredocs.append((target, content))
        return Token("<<", line, heredoc=content)

    def _skip_heredocs(self) -> None:
        for target, content in self._heredocs:
            delimiter, lines = re.sub(r"['\"\\]", "", target), []
            while self._at < len(self._text):
                end = self._end_of_line()
                line, self._at = self._text[self._at : end], end + 1
                if line.strip() == delimiter:
                    break
                lines.append(line)
            text = "\n".join(lines)
            quote = "'" if delimiter != target else '"'
            content.append(quote + text.replace(quote, "\\" + quote) + quote)
        self._heredocs = []

    def _arithmetic(self) -> Token:
        """`((expression))` as one word."""
        start, self._at = self._at, _matching(self._text, self._at)
        return Token(self._text[start : self._at], line_of(self._text, start))

    def _word(self) -> Token:
        text, start = self._text, self._at
        while self._at < len(text):
            char = text[self._at]
            if char == "\\":
                self._at += 2
            elif char in "'\"":
                self._at = end_of_quote(text, self._at)
            elif char == "`":
                self._at = text.find("`", self._at + 1) + 1 or len(text)
            elif char == "$":
                self._at = max(end_of_expansion(text, self._at), self._at + 1)
            elif char == "(" and (match := ASSIGNMENT.fullmatch(text, start, self._at)):
                return self._array(match)
            elif char in " \t\n;|&()<>":
                break
            else:
                self._at += 1
        return Token(text[start : self._at].replace("\\\n", ""), line_of(text, start))

    def _array(self, match: re.Match) -> Token:
        start, self._at = self._at, _matching_array(self._text, self._at)
        words = tokenize(self._text[start + 1 : self._at - 1])
        return Token(
            match[0],
            line_of(self._text, start),
            array=tuple(word.text for word in words if not word.is_operator),
        )


def _matching_array(text: str, start: int) -> int:
    """As `_matching`, for an array, whose comments may have quotes and brackets."""
    at = start + 1
    while at < len(text):
        char = text[at]
        if char == "#" and text[at - 1] in " \t\n(":
            at = text.find("\n", at)
            if at < 0:
                break
        elif char == "\\":
            at += 1
        elif char in "'\"":
            at = end_of_quote(text, at) - 1
        elif char == "$":
            at = max(end_of_expansion(text, at), at + 1) - 1
        elif char == ")":
            return at + 1
        at += 1
    raise ValueError(f"line {line_of(text, start)}: ( is never closed")


class _ScriptParser:
    def __init__(self, tokens: list[Token]):
        self._tokens, self._at = tokens, 0

    def statements(self, ends: tuple[str, ...]) -> tuple:
        """Statements up to one of the words in `ends`, which is not consumed."""
        found = []
        while (token := self._peek()) is not None:
            if token.text in ends:
                return tuple(found)
            if token.is_operator and token.text not in ("(",):
                self._at += 1
                continue
            if (statement := self._statement(token)) is not None:
                found.append(statement)
        if ends:
            raise ValueError(f"the script ends before {' or '.join(ends)}")
        return tuple(found)

    def _peek(self) -> Token | None:
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def _take(self, expected: str = "") -> Token:
        token = self._peek()
        if token is None or (expected and token.text != expected):
            place = f"line {token.line}" if token else "the end"
            raise ValueError(f"{place}: expected {expected or 'a word'}")
        self._at += 1
        return token

    def _statement(self, token: Token):
        match token.text:
            case "if":
                return self._if()
            case "case":
                return self._case()
            case "for" | "while" | "until" | "select":
                return self._loop()
            case "{" | "(":
                self._at += 1
                body = self.statements((CLOSERS[token.text],))
                self._at += 1
                return Block(body, token.line, self._connector())
            case "function":
                self._at += 2
                return self._function()
        following = self._tokens[self._at + 1 : self._at + 3]
        if not token.is_operator and [t.text for t in following] == ["(", ")"]:
            self._at += 1
            return self._function()
        return self._command()

    def _function(self) -> None:
        while (token := self._peek()) is not None and token.text in ("(", ")", "\n"):
            self._at += 1
        self._take("{")
        self.statements(("}",))
        self._at += 1

    def _connector(self) -> str:
        token = self._peek()
        return token.text if token is not None and token.is_operator else ""

    def _command(self) -> Command:
        words: list[Token] = []
        while (token := self._peek()) is not None:
            in_test = words and words[0].text == "[[" and words[-1].text != "]]"
            if token.is_operator and not in_test:
                break
            words.append(token)
            self._at += 1
        return Command(tuple(words), self._connector())

    def _if(self) -> Branches:
        line, choices = self._take().line, []
        while True:
            condition = self.statements(("then",))
            self._at += 1
            choices.append((condition, self.statements(("elif", "else", "fi"))))
            end = self._take().text
            if end == "else":
                choices.append(((), self.statements(("fi",))))
                self._at += 1
            if end != "elif":
                return Branches(None, tuple(choices), line)

    def _case(self) -> Branches:
        self._take()
        subject, choices = self._take(), []
        self._skip_newlines()
        self._take("in")
        while True:
            self._skip_newlines()
            if self._take_if("esac"):
                return Branches(subject, tuple(choices), subject.line)
            self._take_if("(")
            patterns = [self._take()]
            while self._take_if("|"):
                patterns.append(self._take())
            self._take(")")
            choices.append((tuple(patterns), self.statements((";;", "esac"))))
            self._take_if(";;")

    def _loop(self) -> Block:
        token, variable, condition = self._take(), "", ()
        words: list[str] = []
        if token.text in ("for", "select"):
            variable = self._take().text
            while (word := self._peek()) is not None and word.text != "do":
                words.append(word.text)
                self._at += 1
        else:
            condition = self.statements(("do",))
        self._take("do")
        body = self.statements(("done",))
        self._at += 1
        listed = tuple(word for word in words if word not in (";", "\n", "in"))
        return Block(body, token.line, self._connector(), condition, variable, listed)

    def _skip_newlines(self) -> None:
        while self._take_if("\n"):
            pass

    def _take_if(self, text: str) -> bool:
        token = self._peek()
        if token is None or token.text != text:
            return False
        self._at += 1
        return True
