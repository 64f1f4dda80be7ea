"""The interface of a logger, and the warning about one that fails."""

from typing import Any, Protocol, runtime_checkable

import rich
from rich.text import Text


@runtime_checkable
class Logger(Protocol):
    """A destination of metrics and samples."""

    def metrics(self, step: int, values: dict[str, float]) -> None:
        """Logs metrics of a step. Called more than once per step: validation is separate."""
        ...

    def samples(self, step: int, records: list[dict[str, Any]]) -> None:
        """Logs sampled completions, with the fields of samples.jsonl except the step."""
        ...

    def text(self, text: str) -> None:
        """Logs free text for the reader."""
        ...

    def close(self) -> None: ...


def warn(message: str, error: Exception | None = None) -> None:
    """Prints a warning and the error in one line."""
    if error is not None:
        message += f": {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    rich.get_console().print(Text(f"warning: {message}", "yellow"), soft_wrap=True)
