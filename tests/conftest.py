"""Eight simulated CPU devices for every test, unless JAX_PLATFORMS names others."""

import os
import pathlib
import time

import jax
import pytest

jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS") or "cpu")
jax.config.update("jax_num_cpu_devices", 8)

from sharding import make_mesh  # noqa: E402  the device count is set first


@pytest.fixture
def one_device():
    """Runs the test on a mesh of one device."""
    with jax.set_mesh(make_mesh()):
        yield


MAPS = pathlib.Path("/proc/self/maps")


@pytest.fixture(autouse=True)
def room_for_programs():
    """Compiled programs take memory mappings, of which Linux gives a process 65,530; without one more
    the compiler aborts. So the programs so far go once they hold a third of them."""
    start = time.monotonic()
    yield
    compiled_much = time.monotonic() - start > 1.0  # counting takes milliseconds
    if compiled_much and MAPS.exists() and MAPS.read_text().count("\n") > 20_000:
        jax.clear_caches()
