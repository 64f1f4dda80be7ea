"""From the name of a reward to the function: built in, or the user's by import path.

"math", "last_number?require_stop=false", "package.module:function", "path/to/file.py:function". What
follows "?" are keyword arguments, joined by "&"; true, false, numbers and quoted texts are read as
Python reads them, anything else as text.
"""

import ast
import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

RewardFunction = Callable[..., Any]

BUILT_IN = {
    "by_source": "jaxrl.rewards.by_source:by_source",
    "exact": "jaxrl.rewards.exact:exact",
    "format": "jaxrl.rewards.format:format",
    "gsm8k": "jaxrl.rewards.gsm8k:gsm8k",
    "last_number": "jaxrl.rewards.last_number:last_number",
    "math": "jaxrl.rewards.math:math",
    "reasoning_gym": "jaxrl.rewards.reasoning_gym:reasoning_gym",
}


def part_names(specs: Sequence[str]) -> tuple[str, ...]:
    """One short name per reward, used in metrics: the function's, or the whole text where two share it.

    Raises ValueError for a name that is neither built in nor an import path.
    """
    names = [_target(spec).rpartition(":")[2] for spec in specs]
    return tuple(
        name if names.count(name) == 1 else spec for name, spec in zip(names, specs, strict=True)
    )


def load_function(spec: str) -> RewardFunction:
    """Imports the function and binds its options. Raises ValueError that says what is wrong."""
    module_name, _, name = _target(spec).rpartition(":")
    module = _module(module_name, spec)
    function = getattr(module, name, None)
    if not callable(function):
        found = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise ValueError(
            f"reward {spec!r}: {module_name} has no function {name!r}; it has "
            f"{', '.join(found) or 'none'}"
        )
    options = _options(spec)
    return functools.partial(function, **options) if options else function


def _target(spec: str) -> str:
    """ "module:function" of a name or an import path."""
    name = spec.partition("?")[0]
    if ":" in name:
        return name
    if name not in BUILT_IN:
        raise ValueError(
            f"unknown reward {name!r}; set reward.functions to names of {', '.join(BUILT_IN)}, to "
            "'package.module:function' or to 'path/to/file.py:function'"
        )
    return BUILT_IN[name]


def _module(name: str, spec: str) -> ModuleType:
    try:
        return (
            _module_of_file(Path(name)) if name.endswith(".py") else importlib.import_module(name)
        )
    except Exception as error:  # the user's code
        raise ValueError(
            f"reward {spec!r}: {name} cannot be imported ({type(error).__name__}: {error}); set "
            "reward.functions to a module on the Python path or to a file"
        ) from error


def _module_of_file(path: Path) -> ModuleType:
    name = f"jaxrl_reward_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # the name ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look it up there
    spec.loader.exec_module(module)
    return module


def _options(spec: str) -> dict[str, Any]:
    query = spec.partition("?")[2]
    pairs = [option.partition("=") for option in query.split("&") if option]
    return {name: _literal(value) for name, _, value in pairs}


def _literal(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
