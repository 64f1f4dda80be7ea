"""JSON objects in files that others wrote: read with one clear error for every kind of damage."""

from pathlib import Path
from typing import Any

from jaxrl.json_text import parse_json

MAX_BYTES = 100_000_000  # the largest header that the safetensors format allows


def read_object(path: Path, advice: str) -> dict[str, Any]:
    """The JSON object in a file. Raises ValueError with the file's name and `advice`."""
    try:
        if not path.is_file():
            raise ValueError(f"{path} is not a regular file; {advice}")
        if (size := path.stat().st_size) > MAX_BYTES:
            raise ValueError(f"{path} has {size} bytes, more than {MAX_BYTES}; {advice}")
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror or error}); {advice}") from error
    return parse_object(data, str(path), advice)


def parse_object(data: bytes, name: str, advice: str) -> dict[str, Any]:
    """The JSON object in `data`. Raises ValueError with `name` and `advice`."""
    try:
        value = parse_json(data.decode("utf-8-sig"))  # some editors write a byte order mark
    except ValueError as error:
        raise ValueError(f"{name} is not valid JSON ({error}); {advice}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{name} is a JSON {type(value).__name__}, not an object; {advice}")
    return value
