"""The host's memory: its size, and settings of the C allocator for runs whose device is the CPU."""

import ctypes
import mmap
import os

# mallopt(3), malloc.h of glibc
M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8


def keep_freed_memory() -> bool:
    """Keeps freed memory in the process instead of returning it to the OS. False if unsupported.

    A compiled program on CPU allocates its temporaries in every call, a gigabyte for an update of a
    small model. By default glibc maps them again each time, so that every page is cleared and
    faulted in: a quarter of the time of the update and two thirds of the optimizer step. The
    process keeps at most its earlier peak plus fragmentation.
    """
    libc = ctypes.CDLL(None)
    mallopt = getattr(libc, "mallopt", None)
    if mallopt is None:  # musl, macOS
        return False
    # All arrays come from the one growing heap, and it does not shrink.
    kept = mallopt(M_MMAP_MAX, 0) and mallopt(M_TRIM_THRESHOLD, -1) and mallopt(M_ARENA_MAX, 1)
    if kept:
        request_huge_pages(libc)
    return bool(kept)


def request_huge_pages(libc: ctypes.CDLL) -> None:
    """Lets the kernel back the heap with pages of 2 MiB, which makes reading weights faster.

    Has an effect if /sys/kernel/mm/transparent_hugepage/enabled is "madvise". The request covers an
    address range, so the heap first grows to half of the machine's memory. That reserves addresses,
    not memory.
    """
    size = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE // 2
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    block = libc.malloc(size)
    if block is None:  # the address space of the process is limited
        return
    first = -(-block // mmap.PAGESIZE) * mmap.PAGESIZE
    libc.madvise(first, size - mmap.PAGESIZE, mmap.MADV_HUGEPAGE)
    libc.free(block)


def physical_memory() -> int:
    """Bytes of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
