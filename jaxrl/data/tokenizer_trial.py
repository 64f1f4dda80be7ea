"""A trial of a tokenizer.json in a child process: one short text there and back.

The tokenizers library panics, aborts or hangs on some malformed files, which no exception handler
of this process would survive. A file that has passed is not tried again: a cache folder remembers
the hash of its content. This module is also the program of the child process.
"""

import contextlib
import hashlib
import os
import resource
import subprocess
import sys
from pathlib import Path

import tokenizers

TEXT = "The 12 cafés don't wait:\n\n   <|end|> 你好 🙂\t" + "a" * 48 + " " * 24 + "x = [1, 2];\r\n"
TIMEOUT_S = 60.0  # the largest published files take 2 s
MAX_BYTES = 8 * 2**30  # address space of the child
PASSED, PANICKED = "passed", 3


def try_tokenizer(file: Path, *, timeout_s: float = TIMEOUT_S) -> None:
    """Raises ValueError if loading the file or using it panics, ends the process or hangs.

    Other errors are left to the one who loads it.
    """
    with file.open("rb") as data:
        digest = hashlib.file_digest(data, "sha256").hexdigest()
    mark = cache_dir() / f"{digest}-{tokenizers.__version__}"
    if mark.exists():
        return
    program = [sys.executable, "-P", __file__, str(file)]
    quiet = os.environ | {"RUST_BACKTRACE": "0", "TOKENIZERS_PARALLELISM": "false"}
    try:
        ended = subprocess.run(program, capture_output=True, timeout=timeout_s, env=quiet)
    except subprocess.TimeoutExpired:
        raise ValueError(f"it did not finish a short text within {timeout_s:g} s") from None
    if ended.returncode == PANICKED or ended.returncode < 0:
        lines = ended.stderr.decode(errors="replace").strip().splitlines()
        raise ValueError(f"it ends its process: {' '.join(lines[:3])[:300]}")
    if ended.stdout.decode(errors="replace").strip() == PASSED:
        with contextlib.suppress(OSError):
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()


def cache_dir() -> Path:
    """~/.cache/jaxrl/tokenizers, or its equivalent under XDG_CACHE_HOME."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "jaxrl" / "tokenizers"


def main(file: str) -> None:
    """Encodes and decodes a text in this process, which may end in any way."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        tokenizer = tokenizers.Tokenizer.from_file(file)
        tokenizer.decode(tokenizer.encode(TEXT).ids)
        print(PASSED)
    except Exception:  # the caller's own load reports it
        pass
    except BaseException:  # a panic, which has printed its message
        sys.exit(PANICKED)


if __name__ == "__main__":
    main(sys.argv[1])
