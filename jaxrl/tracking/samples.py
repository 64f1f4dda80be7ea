"""Sampled completions as trackers and the console show them: rows, Markdown, printable text."""

import re
from collections.abc import Sequence
from typing import Any

MAX_CHARS = 600  # of a prompt or a completion in the console
IMAGES = "images"  # folder of the images of samples, in the run folder
IMAGE_NAME = re.compile(rf"{IMAGES}/[0-9a-f]{{16}}\.jpg")  # of a file, below the run folder
COLUMNS = ("kind", "source", "prompt", "completion", "answer", "reward", "finish")


def sample_rows(records: Sequence[dict[str, Any]]) -> list[list[Any]]:
    """One row per sample, with the fields of COLUMNS."""
    return [[record.get(name) for name in COLUMNS] for record in records]


def samples_name(records: Sequence[dict[str, Any]]) -> str:
    """The name under which trackers show the samples of a step: samples/train or samples/val."""
    return f"samples/{records[0].get('kind', 'train')}"


def samples_markdown(records: Sequence[dict[str, Any]]) -> str:
    """Several samples as Markdown text."""
    return "\n\n".join(map(sample_markdown, records))


def sample_markdown(record: dict[str, Any]) -> str:
    """One sample as Markdown text."""
    head = f"reward {record.get('reward')}, answer {record.get('answer')}, {record.get('finish')}"
    quoted = (
        f"    {record.get(name)}".replace("\n", "\n    ") for name in ("prompt", "completion")
    )
    return "\n\n".join([head, *quoted])


def printable(text: str, limit: int = MAX_CHARS) -> str:
    """`text` without control characters, which the terminal would interpret.

    A text over `limit` characters loses its middle.
    """
    if len(text) > limit:
        text = f"{text[: limit // 2]} [...] {text[-limit // 2 :]}"
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )
