"""Tests of jaxrl/runtime/compile_watch.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.runtime.compile_watch import CompileWatch, RecompileError


def test_a_compilation_after_warm_up_stops_with_its_shapes():
    watch = CompileWatch()
    try:
        f = jax.jit(lambda x: x * 2.0)
        with watch.no_compile("update", step=3, armed=False):
            f(jnp.ones((2, 3)))
        with watch.no_compile("update", step=3, armed=True):
            f(jnp.ones((2, 3)))
        with (
            pytest.raises(RecompileError, match=r"(?s)step 3.*float32\[5,3\]"),
            watch.no_compile("update", step=3, armed=True),
        ):
            f(np.ones((5, 3), np.float32))
    finally:
        watch.detach()
