"""Versions of the packages, of Python and of jaxrl's own source that a process runs."""

import importlib.metadata
import platform
import subprocess
from pathlib import Path

import jaxrl
import sharding
from jaxrl.data.digest import digest

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "transformers", "numpy")
SOURCE = "source code of jaxrl"


def versions() -> dict[str, str]:
    """Name -> version of each package, of Python, and a hash of jaxrl's source files."""
    found = {name: importlib.metadata.version(name) for name in PACKAGES}
    found["Python"] = platform.python_version()
    folders = [Path(package.__path__[0]) for package in (jaxrl, sharding)]
    found[SOURCE] = digest(
        path.read_bytes() for folder in folders for path in sorted(folder.rglob("*.py"))
    )
    return found


def commit() -> str:
    """The git commit of jaxrl's source, with "+ changes" if files differ; "" outside of a clone."""
    folder = Path(jaxrl.__path__[0])

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip()

    try:
        if not git("ls-files", "--", "__init__.py"):
            return ""  # installed into another project's clone
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short=12", "HEAD") + (" + changes" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return ""
