"""Communication between the processes of a run: exchange of host data, and errors raised together.

Every process must call these functions in the same order. With one process they return the
process's own value and open no device.
"""

import contextlib
import contextvars
import functools
import os
import pickle
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding

MESSAGE_BYTES = 1024  # first message, with the length of the whole value
CHUNK_BYTES = 1 << 20  # longer values follow in chunks of one size, so that nothing recompiles
_DEVICES = contextvars.ContextVar[tuple[Any, ...]]("devices of the exchange", default=())


class AgreedError(ValueError):
    """An error that every process raises; only process 0 prints it."""


def n_processes() -> int:
    """Processes of the run. Opens the backend only after jax.distributed is initialized."""
    return jax.process_count() if jax.distributed.is_initialized() else 1


def process_id() -> int:
    return jax.process_index() if jax.distributed.is_initialized() else 0


def is_main_process() -> bool:
    """Whether this is process 0, which logs and writes files for the run."""
    return process_id() == 0


def gather(value: Any) -> list[Any]:
    """The `value` of every process, in process order. It must be picklable."""
    if n_processes() == 1:
        return [value]
    data = pickle.dumps(value)
    head = len(data).to_bytes(8, "little") + data[: MESSAGE_BYTES - 8]
    heads = _gather_bytes(head, MESSAGE_BYTES)
    lens = [int.from_bytes(one[:8], "little") for one in heads]
    parts = [[one[8:]] for one in heads]
    for start in range(MESSAGE_BYTES - 8, max(lens), CHUNK_BYTES):
        chunks = _gather_bytes(data[start : start + CHUNK_BYTES], CHUNK_BYTES)
        for part, chunk in zip(parts, chunks, strict=True):
            part.append(chunk)
    return [pickle.loads(b"".join(p)[:n]) for p, n in zip(parts, lens, strict=True)]


def _gather_bytes(data: bytes, size: int) -> list[bytes]:
    mesh, replicate = _exchange(_DEVICES.get() or tuple(jax.devices()))
    by_process, shape = NamedSharding(mesh, jax.P("process")), (n_processes(), size)
    row = np.frombuffer(data.ljust(size, b"\0"), np.uint8)[None]
    with jax.set_mesh(mesh):
        rows = replicate(jax.make_array_from_process_local_data(by_process, row, shape))
    return [row.tobytes() for row in np.asarray(rows.addressable_data(0))]


@functools.cache
def _exchange(devices: tuple[Any, ...]) -> tuple[Mesh, Callable[[jax.Array], jax.Array]]:
    """(mesh of these devices with the axis "process", program that replicates rows on it)."""
    rows = np.array(sorted(devices, key=lambda device: device.process_index))
    mesh = Mesh(rows.reshape(n_processes(), -1), ("process", "local"))
    return mesh, jax.jit(lambda a: a, out_shardings=NamedSharding(mesh, jax.P()))


def warm_up() -> None:
    """Compiles the exchange of short and of long messages."""
    gather(b"\0" * (MESSAGE_BYTES + 1))


@contextlib.contextmanager
def exchange_on(devices: Sequence[Any]) -> Iterator[None]:
    """Exchanges of this thread in the block use these devices, as many of every process.

    The others may then run programs of other threads: if two programs are started on several
    devices in another order on each, they wait for each other forever.
    """
    token = _DEVICES.set(tuple(devices))
    try:
        warm_up()
        yield
    finally:
        _DEVICES.reset(token)


def barrier() -> None:
    """Waits until every process has reached this call."""
    gather(None)


def broadcast(value: Any) -> Any:
    """The `value` of process 0."""
    return gather(value if is_main_process() else None)[0]


def local_slice(n_items: int, n_sharing: int | None = None) -> slice:
    """This process's slice of `n_items` items, which are split over the processes in order.

    With `n_sharing` they are split over so many of the first processes; the others have none.
    """
    n = n_processes() if n_sharing is None else n_sharing
    first, last = (min(process_id() + k, n) for k in (0, 1))
    return slice(n_items * first // n, n_items * last // n)


def gather_items(items: Sequence[Any]) -> list[Any]:
    """The items of all processes as one list; the inverse of `local_slice`."""
    return [item for part in gather(list(items)) for item in part]


def host_array(array: jax.Array) -> np.ndarray:
    """The whole array on this host; shards of other processes are gathered."""
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


@contextlib.contextmanager
def raise_together() -> Iterator[None]:
    """Runs the block on every process; if it fails on any of them, all raise its message.

    Covers ValueError and OSError, whose messages explain themselves; raises AgreedError.
    """
    problem = None
    try:
        yield
    except (ValueError, OSError) as error:
        if n_processes() == 1:
            raise
        problem = error
    reports = gather(None if problem is None else (socket.gethostname(), str(problem)))
    failed = {i: report for i, report in enumerate(reports) if report is not None}
    if not failed:
        return
    texts = {text for _, text in failed.values()}
    if len(failed) == len(reports) and len(texts) == 1:
        raise AgreedError(texts.pop()) from problem
    lines = [f"process {i} on {host}: {text}" for i, (host, text) in failed.items()]
    raise AgreedError("\n".join(lines)) from problem


@contextlib.contextmanager
def main_process_first() -> Iterator[None]:
    """Runs the block on process 0 before the others, which may read the files that it writes.

    Raises as `raise_together` does. If process 0 fails, the others do not run the block.
    """
    if not is_main_process():
        with raise_together():  # process 0 runs the block
            pass
    with raise_together():
        yield
    if is_main_process():
        with raise_together():  # the others run the block
            pass


def exit_immediately(status: int) -> None:
    """Ends this process without the exit barrier of jax.distributed; returns if it is the only one.

    For errors that the other processes do not share. At a normal exit JAX waits for all processes,
    which would block, because the others wait for this one in a collective. After a hard exit they
    stop as soon as the coordinator misses this process.
    """
    if n_processes() > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def exit_immediately_on_errors() -> None:
    """Makes an uncaught exception end this process as `exit_immediately` does."""

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        traceback.print_exception(kind, error, trace)
        print(
            f"error: process {process_id()} of {n_processes()} on {socket.gethostname()} stops; if "
            "another process stopped before it, see the output of that process for the reason",
            file=sys.stderr,
        )
        exit_immediately(1)

    sys.excepthook = hook
