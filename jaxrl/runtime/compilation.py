"""Compilation of a process: several programs at a time in threads, and none after warm-up."""

import collections
import contextlib
import logging
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import jax

COMPILED = "/jax/core/compile/backend_compile_duration"
DEFAULT_CACHE = "~/.cache/jaxrl/xla"  # of compiled programs
MIN_CACHE_BYTES = 256 << 20  # free on the disk of the cache
SHAPES_LOGGER = "jax._src.interpreters.pxla"  # logs "Compiling jit(f) with global shapes and types"


class RecompileError(RuntimeError):
    """A program compiled in a step after warm-up: its shapes are not among the declared buckets."""


class CompileWatch(logging.Handler):
    """Counts compiled programs. One per process; `detach` removes its listeners from JAX."""

    def __init__(self, on_compiled: Callable[[str, float], None] | None = None):
        super().__init__(logging.DEBUG)
        self.n_compiled = 0
        self._counting = threading.Lock()  # programs compile in several threads
        self._on_compiled = on_compiled
        self._shapes: collections.deque[str] = collections.deque(maxlen=8)
        self._logger = logging.getLogger(SHAPES_LOGGER)
        self._old = (self._logger.level, self._logger.propagate)
        self._logger.addHandler(self)
        self._logger.setLevel(logging.DEBUG)
        self._logger.propagate = False
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if message.startswith("Compiling"):
            self._shapes.append(message.partition(" Argument mapping")[0])

    def _on_event(self, event: str, duration_secs: float, **details: str | int) -> None:
        if event != COMPILED:
            return
        with self._counting:
            self.n_compiled += 1
        if self._on_compiled is not None:
            self._on_compiled(str(details.get("fun_name", "?")), duration_secs)

    @contextlib.contextmanager
    def no_compile(self, phase: str, *, step: int, armed: bool) -> Iterator[None]:
        """Raises RecompileError if the block compiles a program while `armed`."""
        before = self.n_compiled
        yield
        if armed and (n := self.n_compiled - before):
            programs = "\n  ".join(list(self._shapes)[-n:])
            raise RecompileError(
                f"{n} program(s) compiled in phase {phase!r} of step {step}, after warm-up:\n"
                f"  {programs}\n"
                "a shape is not among the declared buckets; add it to config.learner.buckets or "
                "config.rollout, or set config.assert_no_recompile=False to continue"
            )

    def detach(self) -> None:
        jax.monitoring.unregister_event_duration_listener(self._on_event)
        self._logger.removeHandler(self)
        self._logger.setLevel(self._old[0])
        self._logger.propagate = self._old[1]


class CompileThreads:
    """Threads that compile, without Python's lock, while the caller lowers the next program.

    A later call of a jitted function with such arguments finds its program compiled. Processes of
    one run must add the same programs in the same order. The end of a block with it waits for all
    programs.
    """

    def __init__(self, n_threads: int = 0):
        """0 threads: one per core of this process."""
        self._pool = ThreadPoolExecutor(n_threads or n_cores(), "compiler")
        self._compiling: list[Future] = []

    def __enter__(self) -> "CompileThreads":
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            if kind is None:
                self.wait()
        finally:
            self._pool.shutdown(cancel_futures=True)

    def add(
        self, programs: Iterable[jax.stages.Lowered], done: Callable[[], None] = lambda: None
    ) -> None:
        """Starts to compile every program as soon as it is lowered; calls `done` after each."""

        def compile_one(program: jax.stages.Lowered) -> None:
            program.compile()
            done()

        for program in programs:
            self._compiling.append(self._pool.submit(compile_one, program))

    def lower(self, programs: Iterable[jax.stages.Lowered]) -> None:
        """As `add`, but lowers the programs in one of the threads and returns at once.

        The iterator sets the mesh (`lowered_on_mesh`), because every thread has its own.
        """
        self._compiling.append(self._pool.submit(self.add, programs))

    def wait(self) -> None:
        """Returns when all programs are compiled. Raises the first error of the compiler."""
        for one in self._compiling:
            one.result()

    def cancel(self) -> None:
        """Drops programs that no thread compiles yet; `add` and `wait` then raise an error."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def lowered_on_mesh(
    on_mesh: Callable[[], contextlib.AbstractContextManager], programs: Iterable[jax.stages.Lowered]
) -> Iterator[jax.stages.Lowered]:
    """The programs, each lowered in a context `on_mesh()`, which ends before it is returned.

    A generator that stops inside `jax.set_mesh`, and is dropped there, would reset the mesh of
    whichever thread collects it.
    """
    programs = iter(programs)
    while True:
        with on_mesh():
            program = next(programs, None)
        if program is None:
            return
        yield program


def compile_in_threads(programs: Iterable[jax.stages.Lowered], n_threads: int = 0) -> None:
    """Compiles every program in `CompileThreads`. Raises the first error of the compiler."""
    with CompileThreads(n_threads) as threads:
        threads.add(programs)


def n_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def open_cache(setting: str) -> str:
    """Lets JAX keep compiled programs in a folder; "" is the default one.

    Call it before the first compilation. Returns why they cannot be kept, and the remedy; "" if
    they can. JAX then compiles at every start.
    """
    folder = Path(setting or DEFAULT_CACHE).expanduser()
    jax.config.update("jax_compilation_cache_dir", str(folder))
    return cache_problem(folder)


def cache_problem(folder: Path) -> str:
    """Why the folder cannot keep compiled programs, and the remedy; "" if it can."""
    existing = nearest_existing(folder)
    free = shutil.disk_usage(existing).free
    if not (existing.is_dir() and os.access(existing, os.W_OK)):
        problem = f"cannot be written: {existing} is not a folder of this user"
    elif free < MIN_CACHE_BYTES:
        problem = f"has no room: {free >> 20} MiB are free"
    else:
        return ""
    return (
        f"the compilation cache {folder} {problem}, so every start compiles all programs; free "
        "disk space, or set config.compilation_cache to another folder"
    )


def nearest_existing(path: Path) -> Path:
    """The path, or its nearest parent that exists."""
    return next(folder for folder in (path, *path.absolute().parents) if folder.exists())
