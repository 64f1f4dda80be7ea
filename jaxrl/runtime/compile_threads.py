"""Compiles several lowered programs at a time: XLA releases Python's lock while it compiles."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager

import jax


class CompileThreads:
    """Threads that compile while the caller's thread lowers the next program.

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
    on_mesh: Callable[[], AbstractContextManager], programs: Iterable[jax.stages.Lowered]
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
