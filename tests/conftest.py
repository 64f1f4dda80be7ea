"""Settings of all tests: eight simulated CPU devices unless JAX_PLATFORMS names another platform,
one compilation cache that all test processes share, quick compilation in the default run, and the
options that scripts/ci_tests.py and scripts/slow_tests.py give."""

import json
import os
import pathlib
import time
import zlib

import jax
import pytest

jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS") or "cpu")
jax.config.update("jax_num_cpu_devices", 8)
# All test processes and the runs that they start share one compilation cache. It keeps small
# programs too, because a test compiles hundreds of them.
CACHE = os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", str(pathlib.Path(__file__).parents[1] / ".jax_cache")
)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
jax.config.update("jax_compilation_cache_dir", CACHE)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

from sharding import make_mesh  # noqa: E402  the device count is set first

# XLA's optimizations are 30 % of the CPU time of the tests (docs/LOG.md).
QUICK_COMPILE = "--xla_backend_optimization_level=0"


def pytest_addoption(parser):
    parser.addoption("--record", help="append a JSON line per test to this file: name, result, s")
    parser.addoption("--until", type=float, help="skip tests that would start after this Unix time")
    parser.addoption("--shard", help="K/N: only the K-th of N parts of the tests, divided by name")


def pytest_configure(config):
    """Compiles without XLA's optimizations, except for -m thorough, bitwise, slow or gpu.

    Cases whose numbers depend on them have the mark `bitwise` and also run in the optimized run.
    """
    default = config.getoption("markexpr") == "not thorough and not slow"
    if default and QUICK_COMPILE not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {QUICK_COMPILE}".strip()

    if config.getoption("record") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(pathlib.Path(config.getoption("record"))))


def pytest_collection_modifyitems(config, items):
    if not config.getoption("shard"):
        return
    k, n = map(int, config.getoption("shard").split("/"))
    others = [item for item in items if zlib.crc32(item.nodeid.encode()) % n != k]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if zlib.crc32(item.nodeid.encode()) % n == k]


def pytest_runtest_setup(item):
    until = item.config.getoption("until")
    if until is not None and time.time() > until:
        pytest.skip(OUT_OF_TIME)


OUT_OF_TIME = "out of time"


class Recorder:
    """Appends the result of each test to a file as soon as it is known."""

    def __init__(self, path: pathlib.Path):
        self._path, self._rows = path, {}

    def pytest_runtest_logreport(self, report):
        row = self._rows.setdefault(report.nodeid, {"result": "passed", "s": 0.0})
        row["s"] = round(row["s"] + report.duration, 2)
        if report.failed:
            row["result"] = "failed"
        elif report.skipped:
            row |= {"result": "skipped", "reason": str(report.longrepr[-1])}
        if report.when not in ("setup", "call"):  # the end, or the report of a process that died
            self._write(report.nodeid, self._rows.pop(report.nodeid))

    def pytest_collectreport(self, report):
        if report.failed:
            self._write(report.nodeid, {"result": "failed", "s": 0.0})

    def _write(self, name, row):
        with self._path.open("a") as file:
            print(json.dumps({"name": name} | row), file=file)


@pytest.fixture(scope="session")
def xla_cache():
    """Folder of the compilation cache that all tests share."""
    return CACHE


@pytest.fixture
def one_device():
    """Runs the test on a mesh of one device."""
    with jax.set_mesh(make_mesh()):
        yield


MAPS = pathlib.Path("/proc/self/maps")


@pytest.fixture(autouse=True)
def limit_memory_mappings():
    """Drops all compiled programs after a test that leaves more than 20,000 memory mappings.

    Compiled programs hold memory mappings. Linux allows 65,530 per process, and the compiler aborts
    when it gets no further one.
    """
    start = time.monotonic()
    yield
    compiled_much = time.monotonic() - start > 1.0  # counting takes milliseconds
    if compiled_much and MAPS.exists() and MAPS.read_text().count("\n") > 20_000:
        jax.clear_caches()
