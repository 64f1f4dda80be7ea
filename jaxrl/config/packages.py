"""Advice to install packages that are not dependencies of jaxrl."""

import importlib.metadata
import re
import shlex


def install_advice(extra: str) -> str:
    """The command that adds the packages of an extra and keeps everything that is installed.

    `uv sync --extra` removes other extras, and jaxrl is not needed from an index.
    """
    try:
        known = importlib.metadata.requires("jaxrl") or []
    except importlib.metadata.PackageNotFoundError:  # a copy of the folder on the Python path
        known = []
    split = [line.partition(";") for line in known]
    found = [name.strip() for name, _, marker in split if _extra(marker) == extra]
    return f"`uv pip install {shlex.join(found or [extra])}`, or pip install without uv"


def _extra(marker: str) -> str:
    """The extra that the marker of a requirement names; "" if none."""
    match = re.search(r"extra == ['\"]([^'\"]+)['\"]", marker)
    return match[1] if match else ""
