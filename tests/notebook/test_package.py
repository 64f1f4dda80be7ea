"""Tests of jaxrl/__init__.py: functions that are imported at their first use."""

import importlib
import subprocess
import sys

import pytest

import jaxrl


def test_importing_the_package_imports_no_jax_and_lists_the_functions():
    code = "import jaxrl, sys; print('jax' in sys.modules, *dir(jaxrl))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded, *names = done.stdout.split()
    assert loaded == "False"
    assert {"RunFolder", "evaluate", "generate", "plan", "train"} <= set(names)


@pytest.mark.parametrize("name", ["evaluate", "plan", "train"])
def test_the_module_of_a_program_is_called_as_the_function(name, monkeypatch):
    notebook, called = importlib.import_module("jaxrl.notebook"), []
    monkeypatch.setattr(notebook, name, lambda *args, **kwargs: called.append((args, kwargs)))
    module = importlib.import_module(f"jaxrl.{name}")
    assert getattr(jaxrl, name) is module
    getattr(jaxrl, name)("quickstart", overrides={})
    assert called == [(("quickstart",), {"overrides": {}})]
    assert callable(module.main if name == "plan" else getattr(module, name))  # still the module


def test_other_names_are_no_attributes():
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = jaxrl.trian  # pyright: ignore
