"""Scores of a teacher by the content of the request, in a folder."""

import io
import zipfile
from pathlib import Path

import numpy as np

from jaxrl.http.reply_cache import ReplyCache
from jaxrl.teachers.replies import GivenScores


class ScoreCache:
    """A folder with one file for each scored sequence; "" keeps nothing."""

    def __init__(self, folder: str):
        self._files = ReplyCache(Path(folder), ".npz") if folder else None

    def get(self, key: str) -> GivenScores | None:
        """The scores; None if there are none."""
        if self._files is None or (content := self._files.get(key)) is None:
            return None
        try:
            with np.load(io.BytesIO(content)) as found:
                return GivenScores(found["logp"], found["ids"], found["top_logp"])
        except (OSError, ValueError, LookupError, zipfile.BadZipFile):  # a damaged file is no file
            return None

    def put(self, key: str, scores: GivenScores) -> None:
        """Keeps the scores of a request. Raises OSError if the folder cannot be written."""
        if self._files is not None:
            content = io.BytesIO()
            np.savez(content, logp=scores.logp, ids=scores.ids, top_logp=scores.top_logp)
            self._files.put(key, content.getvalue())
