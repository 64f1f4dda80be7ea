"""Tests of jaxrl/runtime/compile_threads.py."""

import jax
import numpy as np
import pytest

from jaxrl.runtime.compile_threads import compile_in_threads
from jaxrl.runtime.compile_watch import CompileWatch

X = np.ones((3, 5), np.float32)


def test_calls_find_their_programs_compiled():
    programs = [jax.jit(lambda x, by=by: x * by) for by in (2.0, 3.0, 5.0)]
    watch = CompileWatch()
    try:
        compile_in_threads((program.lower(X) for program in programs), n_threads=2)
        assert watch.n_compiled == 3
        found = [np.asarray(program(X)) for program in programs]
        assert [out[0, 0] for out in found] == [2.0, 3.0, 5.0]
        assert watch.n_compiled == 3
    finally:
        watch.detach()


def test_an_error_of_the_compiler_is_raised():
    def programs():
        yield jax.jit(lambda x: x, compiler_options={"xla_no_such_option": True}).lower(X)
        yield jax.jit(lambda x: x + 1.0).lower(X)

    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
        compile_in_threads(programs(), n_threads=1)


def test_an_error_of_lowering_ends_the_threads():
    def programs():
        yield jax.jit(lambda x: x + 2.0).lower(X)
        raise ValueError("a shape")

    with pytest.raises(ValueError, match="a shape"):
        compile_in_threads(programs(), n_threads=1)
