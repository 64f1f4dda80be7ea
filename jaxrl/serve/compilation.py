"""Compiles the engine's pending programs while the server answers requests."""

import logging
import threading

import jax
from jax.sharding import Mesh

from jaxrl.engine.engine import PagedEngine
from jaxrl.runtime.compilation import CompileThreads, n_cores
from jaxrl.types import Tree
from sharding import on_mesh

log = logging.getLogger(__name__)


class BackgroundCompiler:
    """A thread that lowers the pending programs, and others that compile them."""

    def __init__(self, engine: PagedEngine, params: Tree, mesh: Mesh):
        self._engine, self._mesh = engine, mesh
        self._params = on_mesh(params, mesh)  # shapes only: the server may replace its weights
        self._threads = CompileThreads(max(n_cores() - 1, 1))  # one core is the engine's
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="compile", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Starts no further compilation."""
        self._stopping = True
        self._threads.cancel()

    def join(self, timeout_s: float | None = None) -> None:
        """Waits until all programs are compiled."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            with jax.set_mesh(self._mesh), self._threads:
                self._engine.compile_pending(self._params, self._threads)
        except Exception:  # of the compiler
            if not self._stopping:
                log.exception("compilation failed; the server continues with fewer batch sizes")
        else:
            log.info("all programs are compiled")
