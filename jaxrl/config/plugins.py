"""Plug-ins named in a config: built-in ones by name, the user's own by import path.

"math", "last_number?require_stop=false", "package.module:function", "path/to/file.py:function".
Keyword arguments follow "?" and are joined by "&".
"""

import ast
import difflib
import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from jaxrl.config.schema import convert, did_you_mean, is_import_path, keys, out_of_range
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


def options(spec: str) -> dict[str, Any]:
    """The keyword arguments after "?", joined by "&".

    true, false, numbers and quoted text are read as Python literals, everything else as text.
    """
    query = spec.partition("?")[2]
    pairs = [option.partition("=") for option in query.split("&") if option]
    return {name: _literal(value) for name, _, value in pairs}


def read_options[T](schema: type[T], spec: str, no_options: str = "none") -> tuple[T, list[str]]:
    """(options of "NAME?OPTION=VALUE&..." as the dataclass `schema`, one line per invalid option).

    `no_options` is what the message lists if the schema has none.
    """
    known, used, errors = keys(schema), {}, []
    for option, value in options(spec).items():
        if option not in known:
            hint = did_you_mean(option, known)
            listed = ", ".join(known) or no_options
            errors.append(
                f"{spec!r} has the unknown option {option!r}; {hint}the options of "
                f"{spec.partition('?')[0]} are {listed}"
            )
            continue
        try:
            used[option] = convert(value, known[option])
            wrong = out_of_range(used[option], known[option])
        except ValueError as wrong_type:
            wrong = [str(wrong_type)]
        errors += [f"{spec!r}: {line}" for line in wrong]
    return (schema() if errors else schema(**used)), errors


def _literal(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
