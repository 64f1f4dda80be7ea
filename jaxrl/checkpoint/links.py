"""Symbolic links in checkpoints: no read, write or removal follows them out of the folder."""

import os
from pathlib import Path

from etils import epath

from jaxrl.checkpoint.errors import DamageError


def is_link(path: Path | epath.Path) -> bool:
    """Whether a path is a symbolic link; object storage has none."""
    return "://" not in str(path) and os.path.islink(path)


def refuse_links(folder: Path | epath.Path) -> None:
    """Raises DamageError if the folder of a step is a link, or if there is one in it.

    The folder of all checkpoints may be a link.
    """
    if "://" in str(folder):
        return
    found = [str(folder)] if is_link(folder) else []
    for parent, folders, files in os.walk(folder):
        found += [path for name in (*folders, *files) if os.path.islink(path := f"{parent}/{name}")]
    if found:
        raise DamageError(
            f"{found[0]} is a link to {os.readlink(found[0])}; replace the link by a copy"
        )
