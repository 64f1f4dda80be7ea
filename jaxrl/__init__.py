"""Reinforcement learning for language models in JAX.

    import jaxrl

    run = jaxrl.train("configs/quickstart.py", overrides={"total_steps": 24})

The functions for notebooks are in jaxrl/notebook/, which is imported at the first use of one:
`import jaxrl` itself imports no JAX. `jaxrl.train`, `jaxrl.evaluate` and `jaxrl.plan` are also the
modules of the programs of these names, as in `python -m jaxrl.train`; they can be called.
"""

import importlib
import sys
from types import ModuleType
from typing import Any

PROGRAMS = ("evaluate", "plan", "train")  # modules that are called as functions
FUNCTIONS = ("RunFolder", "generate")


class _CallableProgram(ModuleType):
    """The module of a program, which is called as the function of its name in jaxrl.notebook."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        name = self.__name__.rpartition(".")[2]
        return getattr(_load("jaxrl.notebook"), name)(*args, **kwargs)


class _Package(ModuleType):
    """This package, whose programs can be called as soon as they are imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in PROGRAMS and isinstance(value, ModuleType):
            value.__class__ = _CallableProgram
        super().__setattr__(name, value)


def __getattr__(name: str) -> Any:
    if name in PROGRAMS:
        return _load(f"jaxrl.{name}")
    if name in FUNCTIONS:
        return getattr(_load("jaxrl.notebook"), name)
    raise AttributeError(f"module 'jaxrl' has no attribute {name!r}")


def _load(module: str) -> ModuleType:
    """Imports a module that imports JAX."""
    if "jaxrl.notebook" not in sys.modules:
        importlib.import_module("jaxrl.runtime.start").prepare_libraries()
    return importlib.import_module(module)


def __dir__() -> list[str]:
    return sorted({*globals(), *PROGRAMS, *FUNCTIONS})


sys.modules[__name__].__class__ = _Package
