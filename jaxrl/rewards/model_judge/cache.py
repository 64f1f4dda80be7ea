"""Verdicts of a judge by the content of the request, one small file each."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from jaxrl.json_text import Json, parse_json
from jaxrl.replaced_file import replaced_file


class VerdictCache:
    """A folder that several processes read and write at once."""

    def __init__(self, folder: Path):
        self._folder = folder

    def get(self, key: str) -> str | None:
        """The text of the verdict; None if there is none."""
        try:
            found = parse_json(self._path(key).read_bytes())
        except (OSError, ValueError):  # a damaged file is as good as none
            return None
        verdict = found.get("verdict") if isinstance(found, dict) else None
        return verdict if isinstance(verdict, str) else None

    def put(self, key: str, entry: Mapping[str, str | int]) -> None:
        """Keeps an entry, which has the text of the verdict as "verdict"."""
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        with replaced_file(path) as file:
            file.write(json.dumps(entry).encode())

    def _path(self, key: str) -> Path:
        return self._folder / key[:2] / f"{key}.json"


def content_key(url: str, body: Json) -> str:
    """The hash of a request: server, model, texts, sampling and schema."""
    return hashlib.sha256(json.dumps([url, body], sort_keys=True).encode()).hexdigest()
