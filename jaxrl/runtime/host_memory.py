"""How the C library hands out the memory of arrays where the host is the device."""

import ctypes
import mmap
import os

# mallopt(3), malloc.h of glibc
M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8


def keep_freed_memory() -> bool:
    """From now on memory that this process frees stays with it. False where the C library cannot.

    A compiled program on CPU allocates its temporaries on every call, a gigabyte for an update of a
    small model. By default glibc maps them anew each time, so that every page is cleared and faulted in
    again: a quarter of the update and two thirds of the optimizer step. What stays is at most the peak
    of before and what fragmentation adds to it.
    """
    libc = ctypes.CDLL(None)
    mallopt = getattr(libc, "mallopt", None)
    if mallopt is None:  # musl, macOS
        return False
    # Arrays come from the one growing heap, and it does not shrink.
    kept = mallopt(M_MMAP_MAX, 0) and mallopt(M_TRIM_THRESHOLD, -1) and mallopt(M_ARENA_MAX, 1)
    if kept:
        ask_for_large_pages(libc)
    return bool(kept)


def ask_for_large_pages(libc: ctypes.CDLL) -> None:
    """Lets the kernel back the heap by pages of 2 MiB, if it does so where it is asked ("madvise" in
    /sys/kernel/mm/transparent_hugepage/enabled): weights are then read some percent faster.

    It is asked for addresses, so the heap grows to half of the machine's memory first. That takes addresses, no memory.
    """
    size = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE // 2
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    block = libc.malloc(size)
    if block is None:  # the process may not have so many
        return
    first = -(-block // mmap.PAGESIZE) * mmap.PAGESIZE
    libc.madvise(first, size - mmap.PAGESIZE, mmap.MADV_HUGEPAGE)
    libc.free(block)
