"""How the C library hands out the memory of arrays where the host is the device."""

import ctypes

# mallopt(3), malloc.h of glibc
M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8


def keep_freed_memory() -> bool:
    """From now on memory that this process frees stays with it. False where the C library cannot.

    A compiled program on CPU allocates its temporaries on every call, a gigabyte for an update of a
    small model. By default glibc maps them anew each time, so that every page is cleared and faulted in
    again: a quarter of the update and two thirds of the optimizer step. What stays is at most the peak
    of before and what fragmentation adds to it.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # musl, macOS
        return False
    # Arrays come from the one growing heap, and it does not shrink.
    return bool(
        mallopt(M_MMAP_MAX, 0) and mallopt(M_TRIM_THRESHOLD, -1) and mallopt(M_ARENA_MAX, 1)
    )
