"""Settings of all tests: eight simulated CPU devices unless JAX_PLATFORMS names another platform,
one compilation cache that all test processes share, and quick compilation in the default run."""

import os
import pathlib
import time

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


def pytest_configure(config):
    """Compiles without XLA's optimizations, except for -m thorough, bitwise, slow or gpu.

    Cases whose numbers depend on them have the mark `bitwise` and also run in the optimized run.
    """
    default = config.getoption("markexpr") == "not thorough and not slow"
    if default and QUICK_COMPILE not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {QUICK_COMPILE}".strip()


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
