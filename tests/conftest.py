"""Eight simulated CPU devices for every test."""

import jax
import pytest

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

from sharding import make_mesh  # noqa: E402  the device count is set first


@pytest.fixture
def one_device():
    """Runs the test on a mesh of one device."""
    with jax.set_mesh(make_mesh()):
        yield
