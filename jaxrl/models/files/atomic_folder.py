"""Atomic creation of folders: a folder appears complete or not at all."""

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxrl.config.disk import is_full
from jaxrl.ending import before_ending


@contextlib.contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """A temporary folder next to `target` that replaces it at the end and is removed on an error.

    Raises ValueError if `target` exists and does not contain a model, OSError if the disk is full.
    """
    if target.exists() and not (target / "config.json").exists() and any(target.iterdir()):
        raise ValueError(
            f"{target} exists and contains no model; choose another folder or empty it"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    old = folder.with_name(folder.name + ".old")

    def undo() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        if old.exists() and not target.exists():
            old.rename(target)

    with before_ending(undo):
        try:
            folder.chmod(0o755)  # mkdtemp's folders are private
            yield folder
            if target.exists():
                target.rename(old)
            folder.rename(target)
        except BaseException as error:
            undo()
            if is_full(error):
                raise OSError(
                    f"the disk has no room for {target}; free disk space, or choose a folder on "
                    "another disk"
                ) from error
            raise
    if old.is_symlink():  # the folder that it names stays
        old.unlink()
    shutil.rmtree(old, ignore_errors=True)


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
