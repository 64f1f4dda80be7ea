"""The program in a response: its last fenced block that is Python.

A fence is three or more backticks or tildes. It may be indented (in a list), follow text such as a
tag, and end on the last line of the code:

  <answer>```python
  print(1)```</answer>
"""

import ast
import dataclasses
import itertools
import re
import textwrap
import warnings

_FENCE = re.compile(r"`{3,}|~{3,}")
_LIST_ITEM = re.compile(r"\s*(?:[-*+]|\d+[.)])\s+$")
_PYTHON = {"python", "python3", "py", "py3"}
_LABELS = {*_PYTHON, ""}  # of blocks that can be the program if there is one of them
_EFFECTS = (ast.Call, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_EFFECTS += (ast.Import, ast.ImportFrom, ast.For, ast.While, ast.With)


@dataclasses.dataclass(frozen=True)
class CodeBlock:
    """A fenced block: the first word after its fence in lower case, and its text."""

    label: str
    text: str


def last_program(response: str, prefix: str = "") -> str | None:
    """The last complete block after </think> that is a program; None if there is no block.

    Blocks with another label than Python's count only if there are no others. If none parses, with
    `prefix` before it or alone, the last one is the program.
    """
    found = blocks(response.rpartition("</think>")[2])
    found = [block for block in found if block.label in _LABELS] or found
    if len(found) == 1:
        return found[0].text
    for block in reversed(found):
        tree = _parse(block.text) or _parse(prefix + block.text)
        if tree is not None and _has_effect(tree):
            return block.text
    labelled = [block for block in found if block.label] or found
    return labelled[-1].text if labelled else None


def _has_effect(tree: ast.Module) -> bool:
    """Whether code does something. An example of the output may parse, but has only values."""
    return any(isinstance(node, _EFFECTS) for node in ast.walk(tree))


def blocks(text: str) -> list[CodeBlock]:
    """The complete fenced blocks of a text, in order."""
    lines = text.splitlines(keepends=True)
    marked = [i for i, line in enumerate(lines) if _FENCE.search(line)]
    found, at = [], 0
    for i, first in enumerate(marked):
        if first < at:
            continue
        block, at = _read_block(lines, marked[i + 1 :], first)
        found += [block] if block else []
    return found


def _read_block(lines: list[str], later: list[int], first: int) -> tuple[CodeBlock | None, int]:
    """The block that opens in a line, None if it is not closed, and the line to continue at.

    `later` has the numbers of the lines after it with a fence.
    """
    opening = _FENCE.search(lines[first])
    assert opening is not None
    fence, before = opening[0], lines[first][: opening.start()]
    rest = lines[first][opening.end() :].rstrip()
    label, code = _split_label(rest.partition(fence)[0])
    if fence in rest:  # all in one line
        is_labelled = label in _PYTHON
        block = CodeBlock(label, code) if is_labelled else CodeBlock("", rest.partition(fence)[0])
        return block, first + 1
    indent = len(before) if _LIST_ITEM.match(before) else len(before) - len(before.lstrip())
    last = next((i for i in later if _ends(lines[i], fence, indent)), None)
    inside = itertools.takewhile(lambda i: last is None or i < last, later)
    inline = next((i for i in inside if _closes_inline(lines[i], fence)), None)
    if last is None and inline is None:
        return None, first + 1
    text = _dedent(lines[first + 1 : last], indent)
    if inline is not None and (last is None or _parse(text) is None):
        body = [*lines[first + 1 : inline], lines[inline].rpartition(fence)[0]]
        return CodeBlock(label, _dedent(body, indent)), inline + 1
    assert last is not None
    opens_next = re.match(r"\w", lines[last].strip().lstrip(fence[0]))
    return CodeBlock(label, text), last if opens_next else last + 1


def _ends(line: str, fence: str, indent: int) -> bool:
    """Whether a line begins with the fence, not deeper than the opening one."""
    text = line.lstrip()
    return text.startswith(fence) and len(line) - len(text) <= indent


def _closes_inline(line: str, fence: str) -> bool:
    """Whether a line of code ends with the fence, and perhaps a tag after it."""
    code, found, after = line.rpartition(fence)
    return bool(found and code.strip()) and (not after.strip() or after.lstrip().startswith("</"))


def _split_label(rest: str) -> tuple[str, str]:
    """The label at the start of what follows a fence, "" if it is none, and the text after it."""
    found = re.match(r"\s*\{?\.?(\w[\w+#-]*)[,}]?(?=\s|$)", rest)
    return (found[1].lower(), rest[found.end() :].strip()) if found else ("", rest)


def _dedent(lines: list[str], indent: int) -> str:
    """Lines without the indentation of their fence."""
    text = "".join(lines)
    if not indent:
        return text
    if all(not line.strip() or not line[:indent].strip() for line in lines):
        return "".join(line[indent:] if line.strip() else "\n" for line in lines)
    return textwrap.dedent(text)


def _parse(text: str) -> ast.Module | None:
    with warnings.catch_warnings(action="ignore"):  # of invalid escapes
        try:
            return ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):  # too deep, null bytes
            return None
