"""Replies of servers by the content of the request, one file each."""

import hashlib
import json
from pathlib import Path

from jaxrl.json_text import Json
from jaxrl.replaced_file import replaced_file


class ReplyCache:
    """A folder that several threads and processes read and write at once."""

    def __init__(self, folder: Path, suffix: str):
        self._folder, self._suffix = folder.expanduser(), suffix

    def get(self, key: str) -> bytes | None:
        """The bytes of a key; None if there are none."""
        try:
            return self._path(key).read_bytes()
        except OSError:
            return None

    def put(self, key: str, content: bytes) -> None:
        """Keeps the content of a reply. Raises OSError if the folder cannot be written."""
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        with replaced_file(path) as file:
            file.write(content)

    def _path(self, key: str) -> Path:
        return self._folder / key[:2] / f"{key}{self._suffix}"


def content_key(*request: Json | str | int) -> str:
    """The hash of a request: all that its reply depends on."""
    return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()
