"""Tests of jaxrl/runtime/host_memory.py."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from jaxrl.runtime.host_memory import keep_freed_memory

PROGRAM = """
    import ctypes, os
    from jaxrl.runtime.host_memory import keep_freed_memory
    if {keep}:
        assert keep_freed_memory()
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]

    def resident():
        return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGESIZE") >> 20

    before, size = resident(), 256 << 20
    block = libc.malloc(size)
    ctypes.memset(block, 1, size)
    libc.free(block)
    print(resident() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")
@pytest.mark.parametrize("keep", [True, False])
def test_freed_memory_is_kept_only_on_request(keep):
    program = textwrap.dedent(PROGRAM).format(keep=keep)
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    kept_mib = int(run.stdout)
    assert kept_mib > 240 if keep else kept_mib < 16


LARGE = """
    import ctypes, pathlib
    from jaxrl.runtime.host_memory import keep_freed_memory
    assert keep_freed_memory()
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    size = 256 << 20
    ctypes.memset(libc.malloc(size), 1, size)
    lines = pathlib.Path("/proc/self/smaps_rollup").read_text().splitlines()
    kib = {name: int(number) for name, number, *_ in map(str.split, lines[1:])}
    print(kib["AnonHugePages:"] >> 10, kib["Rss:"] >> 10)
"""
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(
    not SETTING.exists() or "[never]" in SETTING.read_text(), reason="the kernel has no huge pages"
)
def test_arrays_use_huge_pages_and_the_grown_heap_takes_no_memory():
    program = textwrap.dedent(LARGE)
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    large_mib, resident_mib = map(int, run.stdout.split())
    assert large_mib > 200
    assert resident_mib < 512


def test_a_c_library_without_mallopt_is_no_error(monkeypatch):
    monkeypatch.setattr("ctypes.CDLL", lambda name: object())
    assert not keep_freed_memory()
