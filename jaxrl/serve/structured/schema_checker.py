"""Tries JSON schemas in another process (schema_worker.py), before the server compiles them."""

import contextlib
import time
from collections.abc import Sequence

from jaxrl.subprocesses.channel import ProtocolError, wait
from jaxrl.subprocesses.output import OutputLog, print_line
from jaxrl.subprocesses.process import START_TIMEOUT_S, WorkerFailed, WorkerProcess

MODULE = "jaxrl.serve.structured.schema_worker"
CHECK_TIMEOUT_S = 30.0  # of one schema, which has a second of CPU time, on a busy machine
POLL_S = 0.1
STOPPING = "the server is shutting down"


class SchemaChecker:
    """The process, started at the first use and after a failure. For one thread."""

    def __init__(self, tokenizer: str, n_vocab: int, stop_ids: Sequence[int]):
        """`tokenizer` is the text of a tokenizer.json."""
        self._setup = (tokenizer, n_vocab, list(stop_ids))
        self._output = OutputLog(print_line)
        self._process: WorkerProcess | None = None
        self._stopping = False

    def start(self) -> None:
        """Starts the process and waits until it is ready, if it does not run.

        Raises WorkerFailed.
        """
        if self._stopping:
            raise WorkerFailed(STOPPING)
        if self._process is None:
            self._process = WorkerProcess(MODULE, "schemas", self._output)
            self._process.channel.send(self._setup)
            self._answer(START_TIMEOUT_S)

    def check(self, schema: str) -> str:
        """Why a schema, as JSON text, cannot be compiled; "" if it can. Raises WorkerFailed."""
        self.start()
        assert self._process is not None
        self._process.channel.send(schema)
        return self._answer(CHECK_TIMEOUT_S)

    def stop(self) -> None:
        """Makes checks fail soon, also one that another thread waits for, until `close`."""
        self._stopping = True

    def close(self) -> None:
        """Ends the process."""
        self._end()
        self._stopping = False

    def _answer(self, timeout_s: float) -> str:
        """The next answer of the process, which ends if there is none in time."""
        assert self._process is not None
        channel, deadline = self._process.channel, time.monotonic() + timeout_s
        try:
            while time.monotonic() < deadline and not self._stopping:
                if wait([channel], POLL_S) and (answer := channel.receive()) is not None:
                    return str(answer)
            reason = STOPPING if self._stopping else f"no answer in {timeout_s:g} s"
        except (EOFError, ProtocolError) as error:
            reason = str(error) or "the process that compiles them has ended"
        self._end()
        raise WorkerFailed(reason)

    def _end(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            self._process = None
