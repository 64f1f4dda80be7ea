"""first_samples.jsonl: the first training sequences of a run, with what is learned of them.

A line has "prompt_id" and "parts", a list of [text, whether it is learned].
"""

import json
from collections.abc import Sequence
from pathlib import Path

from jaxrl.tracking.json_lines import read_lines
from jaxrl.tracking.samples import printable

FILE = "first_samples.jsonl"
MarkedText = tuple[str, bool]  # text, whether it is learned
LEARNED = ("⟦", "⟧")


def write_first_samples(folder: Path, samples: Sequence[tuple[int, Sequence[MarkedText]]]) -> None:
    """Writes (id of the prompt, parts of the sequence) of each sample to the run folder."""
    lines = (json.dumps({"prompt_id": i, "parts": parts}) + "\n" for i, parts in samples)
    (folder / FILE).write_text("".join(lines), encoding="utf-8")


def read_first_samples(folder: Path) -> list[tuple[int, list[MarkedText]]]:
    """The samples that write_first_samples() wrote; none without the file. Skips damaged lines."""
    found = []
    for line in read_lines(folder / FILE):
        parts = line.get("parts")
        if isinstance(parts, list) and all(_is_part(part) for part in parts):
            found.append((line.get("prompt_id", 0), [(text, learned) for text, learned in parts]))
    return found


def with_brackets(parts: Sequence[MarkedText], limit: int = 0) -> str:
    """The text of a sequence with the learned parts in brackets.

    With a `limit`, the console's form: long parts lose their middle, and control characters are
    replaced.
    """
    shown = [(printable(text, limit) if limit else text, learned) for text, learned in parts]
    return "".join(text.join(LEARNED) if learned else text for text, learned in shown)


def _is_part(part: object) -> bool:
    if not isinstance(part, list) or len(part) != 2:
        return False
    return isinstance(part[0], str) and isinstance(part[1], bool)
