"""Several processes that run one program: how they exchange what lies on their hosts, and agree.

Every process calls these functions, in the same order. A run of one process gets its own answer back
and opens no device.
"""

import contextlib
import os
import pickle
import socket
import sys
import traceback
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

LETTER_BYTES = 1024  # of a message that travels with its length
CHUNK_BYTES = 1 << 20  # what does not fit goes in pieces of one size, so that nothing compiles anew


class Agreed(ValueError):
    """A mistake that every process knows of: all of them stop, and the first one says why."""


def n_processes() -> int:
    """Processes of the run. Opens the backend only where jax.distributed is initialized."""
    return jax.process_count() if jax.distributed.is_initialized() else 1


def process_id() -> int:
    return jax.process_index() if jax.distributed.is_initialized() else 0


def is_first() -> bool:
    """Whether this process speaks and writes for the run."""
    return process_id() == 0


def gather(value: Any) -> list[Any]:
    """The `value` of every process, in the order of the processes. It must be picklable."""
    if n_processes() == 1:
        return [value]
    data = pickle.dumps(value)
    head = len(data).to_bytes(8, "little") + data[: LETTER_BYTES - 8]
    heads = _gather_bytes(head, LETTER_BYTES)
    lens = [int.from_bytes(one[:8], "little") for one in heads]
    parts = [[one[8:]] for one in heads]
    for start in range(LETTER_BYTES - 8, max(lens), CHUNK_BYTES):
        for mine, piece in zip(
            parts, _gather_bytes(data[start : start + CHUNK_BYTES], CHUNK_BYTES), strict=True
        ):
            mine.append(piece)
    return [pickle.loads(b"".join(p)[:n]) for p, n in zip(parts, lens, strict=True)]


def _gather_bytes(data: bytes, size: int) -> list[bytes]:
    padded = np.frombuffer(data.ljust(size, b"\0"), np.uint8)
    return [row.tobytes() for row in multihost_utils.process_allgather(padded)]


def warm_up() -> None:
    """Compiles the exchange of short and of long messages."""
    gather(b"\0" * (LETTER_BYTES + 1))


def barrier() -> None:
    """Until every process is here."""
    gather(None)


def from_first(value: Any) -> Any:
    """The first process's `value`."""
    return gather(value if is_first() else None)[0]


def share(n_items: int) -> slice:
    """The items of this process, of `n_items` that all processes share in order."""
    n, i = n_processes(), process_id()
    return slice(n_items * i // n, n_items * (i + 1) // n)


def joined(items: Sequence[Any]) -> list[Any]:
    """What the processes have of `share`, brought back together."""
    return [item for part in gather(list(items)) for item in part]


def host_array(array: jax.Array) -> np.ndarray:
    """The whole array on this host, wherever its shards are."""
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


@contextlib.contextmanager
def all_or_none() -> Iterator[None]:
    """A block that every process leaves well, or all with the words of those for which it went wrong.

    Takes the mistakes that a message explains, ValueError and OSError; raises Agreed.
    """
    problem = None
    try:
        yield
    except (ValueError, OSError) as error:
        if n_processes() == 1:
            raise
        problem = error
    said = gather(None if problem is None else (socket.gethostname(), str(problem)))
    wrong = {i: words for i, words in enumerate(said) if words is not None}
    if not wrong:
        return
    texts = {text for _, text in wrong.values()}
    if len(wrong) == len(said) and len(texts) == 1:
        raise Agreed(texts.pop()) from problem
    lines = [f"process {i} on {host}: {text}" for i, (host, text) in wrong.items()]
    raise Agreed("\n".join(lines)) from problem


@contextlib.contextmanager
def first_goes_ahead() -> Iterator[None]:
    """A block that the first process runs before the others, for what it leaves on a shared disk.

    Raises what all_or_none raises, without running the block on the others where the first failed.
    """
    if not is_first():
        with all_or_none():  # while the first process runs it
            pass
    with all_or_none():
        yield
    if is_first():
        with all_or_none():  # while the others do
            pass


def leave_alone(status: int) -> None:
    """Ends a process whose mistake the others do not know of, without waiting for them.

    At a normal exit JAX waits until all processes are there; the others would stand in the middle of a
    collective and wait for this one. So it is cut off, and they stop as soon as they miss it.
    """
    if n_processes() > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def leave_alone_on_errors() -> None:
    """From now on an exception that nothing catches ends this process as `leave_alone` does."""

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        traceback.print_exception(kind, error, trace)
        print(
            f"error: process {process_id()} of {n_processes()} on {socket.gethostname()} stops; if "
            "another process stopped before it, the reason stands there",
            file=sys.stderr,
        )
        leave_alone(1)

    sys.excepthook = hook
