"""HTML documents that embed their data, style and script, and need no network."""

import html
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WEB = Path(__file__).parent / "web"


def document(title: str, subtitle: str, main: str, *, data: Any, scripts: Sequence[str]) -> str:
    """The document around the HTML of `main`; the scripts, files of web/, read `data`."""
    return fill(
        "document.html",
        TITLE=html.escape(title),
        SUBTITLE=html.escape(subtitle),
        MAIN=main,
        DATA=embedded(data),
        STYLE=asset("page.css"),
        SCRIPT="\n".join(map(asset, scripts)),
    )


def asset(name: str) -> str:
    return (WEB / name).read_text(encoding="utf-8")


def fill(template: str, **parts: str) -> str:
    """A template with each @@NAME@@ replaced by a part, whose own text is left as it is."""
    pieces = asset(template).split("@@")  # text, name, text, name, ..., text
    return "".join(parts[piece] if i % 2 else piece for i, piece in enumerate(pieces))


def embedded(data: Any) -> str:
    """JSON for a script element: "<" is escaped and NaN is null."""

    def strict(value: Any) -> Any:
        if isinstance(value, float):
            return float(f"{value:.6g}") if math.isfinite(value) else None
        if isinstance(value, dict):
            return {key: strict(one) for key, one in value.items()}
        return [strict(one) for one in value] if isinstance(value, list | tuple) else value

    text = json.dumps(strict(data), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
