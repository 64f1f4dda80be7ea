"""Verdicts of a judge by the content of the request, one small file each."""

import json
from collections.abc import Mapping
from pathlib import Path

from jaxrl.http.reply_cache import ReplyCache
from jaxrl.json_text import parse_json


class VerdictCache:
    """A folder that several processes read and write at once."""

    def __init__(self, folder: Path):
        self._files = ReplyCache(folder, ".json")

    def get(self, key: str) -> str | None:
        """The text of the verdict; None if there is none."""
        try:
            found = parse_json(self._files.get(key) or b"")
        except ValueError:  # a damaged file is as good as none
            return None
        verdict = found.get("verdict") if isinstance(found, dict) else None
        return verdict if isinstance(verdict, str) else None

    def put(self, key: str, entry: Mapping[str, str | int]) -> None:
        """Keeps an entry, which has the text of the verdict as "verdict"."""
        self._files.put(key, json.dumps(entry).encode())
