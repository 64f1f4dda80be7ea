"""The findings of the doctor, and their text without secrets."""

import dataclasses
import os
import re
from collections.abc import Iterable
from typing import Any

from rich.box import SIMPLE
from rich.table import Table
from rich.text import Text

STYLES = {"": "", "ok": "green", "warning": "yellow", "failed": "bold red"}
SECRETS = (  # pattern -> replacement
    (re.compile(r"(\w+://)[^/@\s]+@"), r"\1***@"),  # the user and password of an address
    (re.compile(r"\b(?:hf|sk|ghp|wandb)[_-]\w{8,}"), "***"),
    (re.compile(r"((?:token|secret|password|api_?key)\s*[=:]\s*)\S+", re.IGNORECASE), r"\1***"),
)


@dataclasses.dataclass(frozen=True)
class Finding:
    """One row of the table. `status` is "ok", "warning", "failed", or "" for a fact."""

    section: str
    name: str
    text: str
    status: str = ""


def checked(section: str, name: str, problem: str, fine: str) -> Finding:
    """A finding that failed with `problem`, or the text `fine` if that is empty."""
    return Finding(section, name, problem or fine, "failed" if problem else "ok")


def without_secrets(text: str) -> str:
    """The text with ~ for the home folder, and without passwords and tokens."""
    home = os.path.expanduser("~")
    if home.strip("/"):
        text = re.sub(rf"{re.escape(home)}(?=[/\s:,;'\")]|$)", "~", text)
    for pattern, replacement in SECRETS:
        text = pattern.sub(replacement, text)
    return text


def section_table(section: str, findings: Iterable[Finding]) -> Table:
    """The findings of a section as a table."""
    table = Table(title=section, title_justify="left", title_style="bold", box=SIMPLE)
    table.show_header = False
    for style in ("cyan", None, None):
        table.add_column(style=style, overflow="fold")
    for finding in findings:
        style = STYLES[finding.status]
        text = Text(without_secrets(finding.text))
        table.add_row(finding.name, Text(finding.status, style=style), text)
    return table


def as_json(findings: Iterable[Finding]) -> dict[str, Any]:
    """The findings as the object that --json prints."""
    rows = [dataclasses.replace(one, text=without_secrets(one.text)) for one in findings]
    return {
        "passed": all(row.status != "failed" for row in rows),
        "findings": [dataclasses.asdict(row) for row in rows],
    }
