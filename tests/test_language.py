"""Docs, docstrings, comments and messages use the terms of the field.

`python tests/test_language.py PATH ...` lists what a file or folder still has.
"""

import ast
import io
import pathlib
import re
import sys
import tokenize
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PACKAGES = ("jaxrl", "sharding", "configs", "scripts", "tests")
BANNED = {  # what: what to write instead
    r"lies?|lay": "is stored, is in, is sharded",
    r"laid out over": "sharded over",
    r"beside": "next to, with, alongside",
    r"behind (?:it|them|the (?:prompt|token|last|first))": "after",
    r"anew": "again",
    r"of (?:its|their) own": "separate, its own",
    r"(?:stands?|stood) in": "is in",
    r"what waits": "pending, queued",
    r"(?:no|some)body": "no request, a request, unused",
    r"(?:go|goes|going|gone|went) on": "continue, resume",
    r"asked|said|told": "the term for it: request, prompt, completion, log",
    r"learnt": "learned, trained",
    r"in eight bits|eight-bit": "int8, fp8, quantized",
    r"few rows": "small batches, skinny",
    r"is no (?:multiple|date)": "is not a multiple, is not a date",
}
PROMPTS = {
    "jaxrl/environments/builtin/calculator.py"
}  # texts for models, not for readers of the code
PATTERN = re.compile("|".join(rf"(?P<b{i}>\b(?:{p})\b)" for i, p in enumerate(BANNED)), re.I)
REMEDIES = list(BANNED.values())


def findings(text: str) -> Iterator[tuple[int, str]]:
    """(line number, what is wrong) of a text, without its code spans, code blocks and addresses."""
    text = re.sub(r"```.*?```", lambda m: "\n" * m[0].count("\n"), text, flags=re.DOTALL)
    text = re.sub(r"`[^`\n]*`|https?://\S+", "", text)
    for match in PATTERN.finditer(text):
        remedy = REMEDIES[int(match.lastgroup[1:])]
        yield text.count("\n", 0, match.start()) + 1, f"{match[0]!r}: write {remedy}"


def prose(path: pathlib.Path) -> Iterator[tuple[int, str]]:
    """(line number, text) of the strings and comments of a Python file; the text of any other."""
    source = path.read_text()
    if path.suffix != ".py":
        yield 1, source
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def docstring_openings(path: pathlib.Path) -> Iterator[tuple[int, str]]:
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(ast.parse(path.read_text())):
        opening = (
            (ast.get_docstring(node) or "").partition(" ")[0] if isinstance(node, kinds) else ""
        )
        if opening in ("Of", "What"):
            yield getattr(node, "lineno", 1), f"a docstring begins with {opening!r}"


def problems(path: pathlib.Path) -> list[str]:
    found = [
        (line + offset - 1, what) for line, text in prose(path) for offset, what in findings(text)
    ]
    if path.suffix == ".py":
        found += docstring_openings(path)
    return [f"{path}:{line}: {what}" for line, what in sorted(set(found))]


def files(*roots: pathlib.Path) -> list[pathlib.Path]:
    """Python, C and Markdown files, without this one, which names the words."""
    suffixes = {".py", ".md", ".c", ".h", ".sh"}
    found = [f for root in roots for f in ([root] if root.is_file() else sorted(root.rglob("*")))]
    return [f for f in found if f.suffix in suffixes and f.name != "test_language.py"]


@pytest.mark.parametrize(
    "place", [*PACKAGES, "docs", "README.md", "CONTRIBUTING.md", "AGENTS.md", "CHANGELOG.md"]
)
def test_prose_uses_the_terms_of_the_field(place):
    pages = [path for path in files(ROOT / place) if str(path.relative_to(ROOT)) not in PROMPTS]
    wrong = [line for path in pages for line in problems(path)]
    assert not wrong, "\n".join(wrong[:40])


def test_the_search_finds_words_in_every_kind_of_prose(tmp_path):
    page = tmp_path / "page.py"
    page.write_text('"""Of a row."""\n# lies there\nx = f"goes on with {1}"\nbeside = "a_beside"\n')
    assert [line.split(":")[1] for line in problems(page)] == ["1", "2", "3"]


if __name__ == "__main__":
    for path in files(*map(pathlib.Path, sys.argv[1:])):
        print("\n".join(problems(path)), end="\n" if problems(path) else "")
