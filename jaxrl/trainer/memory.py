"""The report of a run whose device is out of memory."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

from jaxrl.planner.plan import Plan
from jaxrl.planner.report import format_bytes, memory_text, rollout_memory_text
from sharding import hosts


class OutOfMemoryError(RuntimeError):
    """A device ran out of memory. The message has the plan and what to lower."""


@contextlib.contextmanager
def explain_out_of_memory(
    folder: Path | None, make_plan: Callable[[], Plan] | None
) -> Iterator[None]:
    """Turns RESOURCE_EXHAUSTED of a device in the block into an OutOfMemoryError.

    Writes the device memory profile to folder/memory.prof if there is a folder, and adds the plan
    of `make_plan()` and what to lower to the message; None for a program that only generates.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise OutOfMemoryError(explanation(error, folder, make_plan)) from error


def explanation(error: Exception, folder: Path | None, make_plan: Callable[[], Plan] | None) -> str:
    """Where the memory ran out, the use of the devices, the plan per role, and what to lower."""
    notes = getattr(error, "__notes__", ())  # the innermost phase is the first
    where = next((note for note in notes if note.startswith(("in ", "while "))), "")
    lines = [f"out of device memory {where}: {' '.join(str(error).split())[:400]}"]
    lines += [save_memory_profile(folder)] if folder else []
    lines += memory_use()
    try:
        lines.append(memory_text(make_plan()) if make_plan else rollout_memory_text())
    except Exception as failure:  # the first error matters more
        lines.append(f"there is no plan of this run: {failure}")
    return "\n".join(lines)


def save_memory_profile(folder: Path) -> str:
    """Writes the memory profile of this process's devices; returns a line about it."""
    suffix = f".{hosts.process_id()}" if hosts.n_processes() > 1 else ""
    path = folder / f"memory{suffix}.prof"
    try:
        jax.profiler.save_device_memory_profile(str(path))
    except Exception as failure:  # the first error matters more
        return f"the device memory profile could not be written to {path}: {failure}"
    return f"the arrays on the devices are in {path}; show them with: pprof -top {path}"


def memory_use() -> list[str]:
    """One line per local device that reports its memory."""
    found = [(device, device.memory_stats() or {}) for device in jax.local_devices()]
    return [
        f"{device}: {format_bytes(stats['bytes_in_use'])} in use, at most "
        f"{format_bytes(stats.get('peak_bytes_in_use', stats['bytes_in_use']))} so far, of "
        f"{format_bytes(stats.get('bytes_limit', 0))}"
        for device, stats in found
        if "bytes_in_use" in stats
    ]
