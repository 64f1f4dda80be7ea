"""Scores of a teacher by the content of the request: in memory for a step, or in a folder."""

import contextlib
import hashlib
import json
import os
import uuid
import zipfile
from pathlib import Path

import numpy as np

from jaxrl.json_text import Json
from jaxrl.teachers.replies import GivenScores


class ScoreCache:
    """A folder with one file for each scored sequence; "" keeps nothing."""

    def __init__(self, folder: str):
        self._folder = Path(folder).expanduser() if folder else None

    def get(self, key: str) -> GivenScores | None:
        """The scores; None if there are none."""
        if self._folder is None:
            return None
        try:
            with np.load(self._path(self._folder, key)) as found:
                return GivenScores(found["logp"], found["ids"], found["top_logp"])
        except (OSError, ValueError, LookupError, zipfile.BadZipFile):  # a damaged file is no file
            return None

    def put(self, key: str, scores: GivenScores) -> None:
        """Keeps the scores of a request."""
        if self._folder is None:
            return
        path = self._path(self._folder, key)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.stem}.{uuid.uuid4().hex}.npz")
        try:
            np.savez(partial, logp=scores.logp, ids=scores.ids, top_logp=scores.top_logp)
            os.replace(partial, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                partial.unlink()

    @staticmethod
    def _path(folder: Path, key: str) -> Path:
        return folder / key[:2] / f"{key}.npz"


def content_key(url: str, body: Json, n: int) -> str:
    """The hash of a request: server, model, tokens, and how many are scored."""
    return hashlib.sha256(json.dumps([url, body, n], sort_keys=True).encode()).hexdigest()
