"""Tests of jaxrl/config/packages.py, and of every install command that messages and docs advise."""

import re
import tomllib
from pathlib import Path

import pytest

from jaxrl.config.packages import install_advice

ROOT = Path(__file__).parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
FILES = [
    *(
        p
        for folder in ("jaxrl", "sharding", "configs", "scripts")
        for p in ROOT.glob(f"{folder}/**/*")
    ),
    *(p for p in ROOT.glob("docs/**/*.md") if p.name != "LOG.md"),
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
]
# An exact sync removes the other extras and what was added by hand; there is no index with jaxrl.
REMOVES = re.compile(r"uv sync(?![^`\n]*--inexact)[^`\n]*--extra|uv pip sync")
NO_INDEX = re.compile(r"install\s+(?:the extra\s+)?['\"`]*jaxrl(?:\[|\s+with)")


@pytest.mark.parametrize("extra", EXTRAS)
def test_the_advice_adds_the_packages_of_the_extra(extra):
    command = install_advice(extra)
    assert command.startswith("`uv pip install ")
    for requirement in EXTRAS[extra]:
        assert f"'{requirement}'" in command


def test_every_advised_command_keeps_what_is_installed():
    texts = [p for p in FILES if p.suffix in (".py", ".md", ".sh") and p.name != "packages.py"]
    joined = {p: re.sub(r'"\s*\n\s*f?"', "", p.read_text()) for p in texts}  # split messages
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path, text in joined.items()
        for match in [*REMOVES.finditer(text), *NO_INDEX.finditer(text)]
        if not text[match.start() :].startswith("uv sync --extra NAME` removes them")
    ]
    assert not found
    assert len(texts) > 400  # the packages and the pages are read


@pytest.mark.parametrize(
    "command", ["uv sync --extra wandb", "uv pip sync x", "pip install 'jaxrl[ray]'"]
)
def test_commands_that_remove_packages_or_find_none_are_noticed(command):
    assert REMOVES.search(command) or NO_INDEX.search(command)
