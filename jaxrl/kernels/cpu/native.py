"""Compiler and loader of the C kernels in this folder.

The machine's C compiler compiles them at first use into the user's cache. Their sums follow the
order of XLA's matrix products, so a row of decode has the bits that it has in a training batch.
Without a compiler, XLA computes everything.
"""

import ctypes
import functools
import hashlib
import logging
import os
import pathlib
import platform
import subprocess
import tempfile

import jax

log = logging.getLogger(__name__)

SOURCE = pathlib.Path(__file__).with_name("native.c")
FLAGS = ("-O3", "-march=native", "-fno-trapping-math", "-fPIC", "-shared")
HANDLERS = ("skinny_matmul", "paged_attention")


@functools.cache
def is_available() -> bool:
    """Compiles and registers the kernels once; False, with a log line, if that fails."""
    try:
        library = ctypes.CDLL(str(_compiled()))
    except (OSError, subprocess.CalledProcessError) as problem:
        detail = getattr(problem, "stderr", None) or problem
        log.info("native CPU kernels: unavailable, using XLA; %s", detail)
        return False
    for name in HANDLERS:
        handler = jax.ffi.pycapsule(getattr(library, name))
        jax.ffi.register_ffi_target(f"jaxrl_{name}", handler, platform="cpu")
    log.info("native CPU kernels: used for decode")
    return True


def _compiled() -> pathlib.Path:
    """Path of the shared library for these sources, compiler and processor."""
    compiler = os.environ.get("CC", "cc")
    sources = [path.read_text() for path in sorted(SOURCE.parent.glob("*.[ch]"))]
    processor = _processor()
    flags = (*FLAGS, *(["-DWIDE"] if _is_wide(processor) else ["-mtune=generic"]))
    parts = (*sources, compiler, *flags, jax.__version__, *processor.values())
    name = f"native-{hashlib.sha256(''.join(parts).encode()).hexdigest()[:16]}.so"
    cache = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    folder = pathlib.Path(cache) / "jaxrl"
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / name).exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            library = pathlib.Path(scratch) / name
            include = ("-I", jax.ffi.include_dir())
            command = [compiler, *flags, *include, str(SOURCE), "-o", str(library)]
            subprocess.run(command, check=True, capture_output=True, text=True)
            library.rename(folder / name)  # atomic: other processes may do the same
    return folder / name


def _processor() -> dict[str, str]:
    """The processor features that -march=native depends on."""
    names = ("vendor_id", "cpu family", "flags", "Features")
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return {"machine": platform.machine()}
    named = (line.partition(":") for line in lines)
    return {name.strip(): value.strip() for name, _, value in named if name.strip() in names}


def _is_wide(processor: dict[str, str]) -> bool:
    """Whether the processor executes AVX-512 vectors in one piece.

    AMD processors before family 26 (Zen 5) execute them as two halves.
    """
    if "avx512f" not in processor.get("flags", "").split():
        return False
    return "AMD" not in processor["vendor_id"] or int(processor["cpu family"]) >= 26
