"""Plug-ins named in a config: built-in ones by name, the user's own by import path.

"math", "last_number?require_stop=false", "package.module:function", "path/to/file.py:function".
Keyword arguments follow "?" and are joined by "&" (jaxrl/config/options.py).
"""

import difflib
import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from jaxrl.config.options import options
from jaxrl.config.schema import is_import_path
from jaxrl.config.user_code import user_frames

MAX_SHOWN = 12  # functions of a module in an error message


def load_plugin(
    spec: str, *, built_in: Mapping[str, str], key: str, reserved: Container[str] = ()
) -> Callable[..., Any]:
    """Imports the function or class that `spec` names and binds its options.

    `built_in` maps names to import paths, `key` is the config key for error messages, `reserved`
    are options that belong to the caller and are not bound. Raises ValueError with the cause and
    what to set `key` to.
    """
    path = import_path(spec, built_in=built_in, key=key)
    function = load_object(spec, path, key=key, kind="function or class", is_kind=callable)
    bound = {name: value for name, value in options(spec).items() if name not in reserved}
    return functools.partial(function, **bound) if bound else function


def load_object(
    spec: str, path: str, *, key: str, kind: str, is_kind: Callable[[Any], bool]
) -> Any:
    """The value "module:name" or "file.py:name" of `path`, which `spec` stands for.

    Raises ValueError, with the names that the module has, if `is_kind` is False for it; `kind` is
    what the message calls such values.
    """
    module_name, _, name = path.partition("?")[0].rpartition(":")
    module = _import(module_name, spec, key)
    value = getattr(module, name, None)
    if is_kind(value):
        return value
    found = [n for n, v in vars(module).items() if is_kind(v) and not n.startswith("_")]
    near = difflib.get_close_matches(name, found)
    shown = (near or found[:MAX_SHOWN]) if len(found) > MAX_SHOWN else found
    raise ValueError(
        f"{key} {spec!r}: {module_name} has no {kind} {name!r}; set one that it has: "
        f"{', '.join(shown) or 'none'}"
    )


def import_path(spec: str, *, built_in: Mapping[str, str], key: str) -> str:
    """ "module:function" for a built-in name or an import path. Raises ValueError if unknown."""
    name = spec.partition("?")[0]
    if is_import_path(name):
        return name
    if name not in built_in:
        raise ValueError(
            f"{key} has the unknown name {name!r}; set it to one of {', '.join(built_in)}, to "
            "'package.module:function' or to 'path/to/file.py:function'"
        )
    return built_in[name]


def _import(name: str, spec: str, key: str) -> ModuleType:
    try:
        return _import_file(Path(name)) if name.endswith(".py") else importlib.import_module(name)
    except Exception as error:  # the user's code
        raise ValueError(
            f"{key} {spec!r}: {name} cannot be imported ({type(error).__name__}: {error}); set it "
            f"to a module on the Python path or to a file{user_frames(error)}"
        ) from error


def _import_file(path: Path) -> ModuleType:
    name = f"jaxrl_plugin_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # the name ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look it up there
    spec.loader.exec_module(module)
    return module
