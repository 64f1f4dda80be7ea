"""Checksums of a checkpoint's files: written as part of a save, verified before a restore.

`checksums.json` in a folder lists the files below it. Every process of a save lists the arrays that
it wrote. The main process then lists all other files, including those lists, in the step's folder.
Orbax's metadata of the step records that there are checksums, so that lost ones are noticed.
"""

import json
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from etils import epath

from jaxrl.checkpoint.errors import DamageError
from jaxrl.json_text import parse_json
from sharding import hosts

FILE = "checksums.json"
ALGORITHM = "crc32"
RECORD = {"checksums": ALGORITHM}  # in the custom_metadata of a step
METADATA = "_CHECKPOINT_METADATA"
AT_COMMIT = (METADATA, "commit_success.txt")  # written after the checksums
N_THREADS = 4  # zlib releases the GIL
CHUNK_BYTES = 1 << 20
MAX_SHOWN = 3  # damaged files in one error message

AnyPath = Path | epath.Path
Checksum = tuple[int, str]  # bytes of the file, and its CRC-32 as eight hex digits


def write_checksums(folder: AnyPath, *, step: int | None = None) -> None:
    """Writes `checksums.json` into `folder`, for all files below it that no inner list has."""
    if folder.is_dir():
        names = list(uncovered_files(folder))
        with ThreadPoolExecutor(N_THREADS) as pool:
            found = pool.map(lambda name: checksum(folder / name), names)
            content = {"step": step, ALGORITHM: dict(zip(names, found, strict=True))}
        (folder / FILE).write_text(json.dumps(content))


def verify_checksums(folder: AnyPath, step: int) -> bool:
    """Reads this process's share of the files of `step` and compares them with their checksums.

    Returns False if the checkpoint was saved without checksums. Raises DamageError with the damaged
    files.
    """
    if not (folder / FILE).exists():
        if folder.exists() and must_have_checksums(folder):
            raise DamageError(f"{FILE} is missing, so damage to the other files would go unnoticed")
        return False
    expected = read_list(folder, step=step)
    for name in [name for name in expected if name.endswith(f"/{FILE}")]:
        raise_damage([problem(folder, name, expected[name])])
        inner, parent = name.removesuffix(FILE), folder / name.removesuffix(f"/{FILE}")
        expected |= {inner + below: value for below, value in read_list(parent).items()}
    by_size = sorted(expected, key=lambda name: (expected[name][0], name))
    share = by_size[hosts.process_id() :: hosts.n_processes()]
    with ThreadPoolExecutor(N_THREADS) as pool:
        raise_damage(list(pool.map(lambda name: problem(folder, name, expected[name]), share)))
    return True


def must_have_checksums(folder: AnyPath) -> bool:
    """Whether a step was saved with checksums, by its metadata or by the lists of its arrays.

    True if the metadata, which every save writes, is missing or damaged too.
    """
    if any(name.endswith(f"/{FILE}") for name in uncovered_files(folder)):
        return True
    try:
        recorded = parse_json((folder / METADATA).read_text())["custom_metadata"]
    except (OSError, ValueError, TypeError, KeyError):
        return True
    return recorded not in ({}, None)


def uncovered_files(folder: AnyPath, prefix: str = "") -> Iterator[str]:
    """Names of the files below `folder`; of a folder with a list, only the list."""
    for path in sorted(folder.iterdir(), key=lambda path: path.name):
        if not path.is_dir():
            if prefix or path.name not in (*AT_COMMIT, FILE):
                yield prefix + path.name
        elif (path / FILE).exists():
            yield f"{prefix}{path.name}/{FILE}"
        else:
            yield from uncovered_files(path, f"{prefix}{path.name}/")


def read_list(folder: AnyPath, *, step: int | None = None) -> dict[str, Checksum]:
    """File name -> checksum, from `checksums.json`. Raises DamageError if it is damaged."""
    try:
        content = parse_json((folder / FILE).read_text())
        saved_step, files = content["step"], content[ALGORITHM]
        found = {str(name): (int(n), str(crc)) for name, (n, crc) in files.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DamageError(f"{folder / FILE} is damaged: {error!r}") from error
    if saved_step != step:
        raise DamageError(f"{folder / FILE} is that of step {saved_step}")
    return found


def problem(folder: AnyPath, name: str, expected: Checksum) -> str | None:
    """The damage of a file; None if its bytes are the saved ones."""
    path, (n_bytes, crc) = folder / name, expected
    try:
        size = path.stat().st_size if isinstance(path, Path) else path.stat().length
        if size != n_bytes:
            return f"{name} has {size} bytes instead of {n_bytes}"
        return None if checksum(path) == expected else f"{name} does not match its checksum {crc}"
    except OSError as error:
        return f"{name} is missing or unreadable ({error.strerror or error})"


def checksum(path: AnyPath) -> Checksum:
    """Size and CRC-32 of a file."""
    n_bytes = crc = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            n_bytes, crc = n_bytes + len(chunk), zlib.crc32(chunk, crc)
    return n_bytes, f"{crc:08x}"


def raise_damage(problems: list[str | None]) -> None:
    """Raises DamageError with the first problems, if there are any."""
    found = [line for line in problems if line is not None]
    if found:
        more = f" and {len(found) - MAX_SHOWN} more" if len(found) > MAX_SHOWN else ""
        raise DamageError("; ".join(found[:MAX_SHOWN]) + more)
