"""Counts compiled programs and stops a run that compiles one after warm-up."""

import collections
import contextlib
import logging
import threading
from collections.abc import Callable, Iterator

import jax

COMPILED = "/jax/core/compile/backend_compile_duration"
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
