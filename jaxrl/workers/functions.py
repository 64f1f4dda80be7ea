"""From the name of a reward to the function: built in, or the user's by import path.

"math", "last_number?require_stop=false", "package.module:function", "path/to/file.py:function". What
follows "?" are keyword arguments, joined by "&"; true, false, numbers and quoted texts are read as
Python reads them, anything else as text. Two of them are the pool's: timeout_s, the seconds that a call of this
function may take, and batch_size, the responses of one call of a function that takes batches.

A function is called by verl's keywords, for one response (data_source, solution_str, ground_truth, extra_info)
or, where its first parameter is `data_sources`, for a batch: the same names with an s, lists, and a list comes
back. Some more arguments are given to functions that have a parameter of the name (MORE).
"""

import ast
import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

RewardFunction = Callable[..., Any]

BUILT_IN = {
    "by_source": "jaxrl.rewards.verifiers.by_source:by_source",
    "code": "jaxrl.rewards.verifiers.code:code",
    "environment": "jaxrl.rewards.verifiers.environment:environment",
    "exact": "jaxrl.rewards.verifiers.exact:exact",
    "format": "jaxrl.rewards.verifiers.format:format",
    "gsm8k": "jaxrl.rewards.verifiers.gsm8k:gsm8k",
    "last_number": "jaxrl.rewards.verifiers.last_number:last_number",
    "math": "jaxrl.rewards.verifiers.math:math",
    "reasoning_gym": "jaxrl.rewards.verifiers.reasoning_gym:reasoning_gym",
    "remote": "jaxrl.rewards.verifiers.remote:remote",
}
# Arguments beside verl's: the prompt as the chat template wrote it; that and the response, special tokens
# included; the seconds that the call may take. In batches the texts have an s at their end, too.
TEXTS = ("prompt_str", "query_str")
MORE = (*TEXTS, "timeout_s")
OF_THE_POOL = {
    "timeout_s": 0.0,
    "batch_size": 64,
}  # options, and what they are where they are not given


class Takes(NamedTuple):
    """How a function wants to be called."""

    batch: bool
    more: tuple[str, ...]  # of MORE, without the s of a batch


def part_names(specs: Sequence[str]) -> tuple[str, ...]:
    """One short name per reward, used in metrics: the function's, or the whole text where two share it.

    Raises ValueError for a name that is neither built in nor an import path.
    """
    names = [_target(spec).rpartition(":")[2] for spec in specs]
    return tuple(
        name if names.count(name) == 1 else spec for name, spec in zip(names, specs, strict=True)
    )


def load_function(
    spec: str,
    built_in: Mapping[str, str] = BUILT_IN,
    key: str = "reward.functions",
    of_others: Container[str] = OF_THE_POOL,
) -> Callable[..., Any]:
    """Imports the function, or the class, and binds its options but for those `of_others`. Raises ValueError that says
    what is wrong and what to set `key` to."""
    module_name, _, name = _target(spec, built_in, key).rpartition(":")
    module = _module(module_name, spec, key)
    function = getattr(module, name, None)
    if not callable(function):
        found = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise ValueError(
            f"{key} {spec!r}: {module_name} has no function {name!r}; it has "
            f"{', '.join(found) or 'none'}"
        )
    options = {k: v for k, v in _options(spec).items() if k not in of_others}
    return functools.partial(function, **options) if options else function


def how_to_call(function: RewardFunction) -> Takes:
    """Read from the names of its parameters."""
    try:
        names = list(inspect.signature(function).parameters)
    except (ValueError, TypeError):  # of some functions written in C
        names = []
    batch = names[:1] == ["data_sources"]
    asked = {name: f"{name}s" if batch and name in TEXTS else name for name in MORE}
    return Takes(batch, tuple(name for name, theirs in asked.items() if theirs in names))


def pool_option(spec: str, name: str) -> float:
    """The value of an option of OF_THE_POOL. Raises ValueError where it is no number above 0."""
    value = _options(spec).get(name)
    if value is None:
        return float(OF_THE_POOL[name])
    if not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"reward {spec!r}: {name}={value!r} is no number above 0")
    return float(value)


def _target(
    spec: str, built_in: Mapping[str, str] = BUILT_IN, key: str = "reward.functions"
) -> str:
    """ "module:function" of a name or an import path."""
    name = spec.partition("?")[0]
    if ":" in name:
        return name
    if name not in built_in:
        raise ValueError(
            f"{key} has the unknown name {name!r}; set it to a name of {', '.join(built_in)}, to "
            "'package.module:function' or to 'path/to/file.py:function'"
        )
    return built_in[name]


def _module(name: str, spec: str, key: str) -> ModuleType:
    try:
        return (
            _module_of_file(Path(name)) if name.endswith(".py") else importlib.import_module(name)
        )
    except Exception as error:  # the user's code
        raise ValueError(
            f"{key} {spec!r}: {name} cannot be imported ({type(error).__name__}: {error}); set it to a "
            "module on the Python path or to a file"
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
