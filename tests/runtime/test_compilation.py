"""Tests of jaxrl/runtime/compilation.py."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.runtime import compilation
from jaxrl.runtime.compilation import (
    CompileWatch,
    RecompileError,
    cache_problem,
    compile_in_threads,
    lowered_on_mesh,
)
from sharding import make_mesh

X = np.ones((3, 5), np.float32)


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


def lowered_with_notes(meshes: list):
    """Lowers five programs, and notes the mesh of each."""
    for i in range(5):
        meshes.append(jax.sharding.get_mesh())
        yield jax.jit(lambda x, i=i: x - i).lower(X)


def test_programs_are_lowered_on_a_mesh_that_ends_before_each_is_returned():
    outer, inner, meshes = make_mesh(), make_mesh(fsdp=2), []
    with jax.set_mesh(outer):
        programs = lowered_with_notes(meshes)
        for _ in lowered_on_mesh(functools.partial(jax.set_mesh, inner), programs):
            assert jax.sharding.get_mesh() is outer
    assert meshes == [inner] * 5


def test_a_dropped_iterator_leaves_the_mesh_of_the_thread_that_drops_it():
    inner, outer = make_mesh(fsdp=2), make_mesh(tensor=2)
    lowered = lowered_on_mesh(functools.partial(jax.set_mesh, inner), lowered_with_notes([]))
    next(lowered)
    with jax.set_mesh(outer):
        del lowered
        assert jax.sharding.get_mesh() is outer
        assert jax.sharding.get_abstract_mesh() is outer.abstract_mesh


def test_a_cache_without_room_or_folder_has_a_remedy(tmp_path, monkeypatch):
    assert cache_problem(tmp_path / "new" / "xla") == ""
    file = tmp_path / "file"
    file.touch()
    assert f"cannot be written: {file} is not a folder" in cache_problem(file / "xla")
    usage = SimpleNamespace(free=12 << 20)
    monkeypatch.setattr(compilation.shutil, "disk_usage", lambda path: usage)
    problem = cache_problem(tmp_path / "xla")
    assert "has no room: 12 MiB are free" in problem and "config.compilation_cache" in problem
