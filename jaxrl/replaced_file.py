"""Atomic writing of files: a reader sees the former bytes or all of the new ones."""

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def replaced_file(path: Path) -> Iterator[BinaryIO]:
    """A file in the same folder that replaces `path` at the end and is removed on an error.

    Threads and processes may write the same path; the last one counts.
    """
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        with open(partial, "xb") as file:
            yield file
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
