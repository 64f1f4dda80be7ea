"""The command line of every entry point: a config file, typed overrides, help.

    python -m jaxrl.train --config=configs/quickstart.py --config.rollout.n=16

`--config=file.py:argument` calls get_config("argument"). `--config.help` lists every key.
"""

import ast
import importlib.util
import os
import pathlib
import re
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

from ml_collections import ConfigDict

import jaxrl
from jaxrl.config.help import USAGE, default, help_text
from jaxrl.config.keys import RunConfig
from jaxrl.config.resolve import resolve
from jaxrl.config.schema import Key, convert, find_key, key_hint, keys, nearest, unknown_key

OVERRIDE = re.compile(r"--?(no)?config\.([^=]+)(?:=(.*))?", re.DOTALL)
CONFIG = re.compile(r"--?config(?:=(.*))?", re.DOTALL)


def parse(argv: Sequence[str]) -> RunConfig:
    """The checked run described by the arguments of a program (sys.argv[1:]).

    Exits after printing the keys for --help and --config.help, and with one message and status 1 on
    any error.
    """
    config, rest = read_args(argv)
    if rest:
        name, known = rest[0].lstrip("-+").split("=")[0], keys(RunConfig)
        is_key = name in known
        hint = f"did you mean --config.{name}?" if is_key else key_hint(name, known, "--config.")
        stop(f"unknown argument {rest[0]}; {hint}; {USAGE}")
    try:
        return resolve(config)
    except ValueError as error:
        stop(str(error))


def read_args(
    argv: Sequence[str], config: ConfigDict | None = None
) -> tuple[ConfigDict, list[str]]:
    """The unchecked config described by the arguments, and the arguments that are not part of it.

    For entry points with additional arguments. `config` is the default if --config is not given.
    Exits as `parse` does.
    """
    try:
        path, overrides, rest = _split(argv)
        if path is not None:
            config = load_config(path)
        if config is None:
            raise ValueError(f"no config file is given; {USAGE}")
        for name, text in overrides:
            override(config, name, text)
        return config, rest
    except (ValueError, FileNotFoundError) as error:
        stop(str(error))


def read_options(arguments: Sequence[str], known: Sequence[str]) -> dict[str, str]:
    """{name: text} of an entry point's additional arguments, --name=text or a bare --name ("").

    Exits with one message for an argument that is not in `known`.
    """
    options = {}
    for argument in arguments:
        name, _, text = argument.lstrip("-").partition("=")
        if name not in known:
            guess = nearest(name, known)
            hint = f"did you mean --{guess}? " if guess else ""
            listed = ", --".join(known)
            stop(f"unknown argument {argument}; {hint}known: --{listed}; --help explains them")
        options[name] = text
    return options


def print_help(text: str) -> NoReturn:
    """Prints a help text and ends the program, also if the reader of a pipe has ended."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise SystemExit(0)


def stop(message: str) -> NoReturn:
    """Ends the program with a message instead of a traceback."""
    raise SystemExit(f"error: {message}")


def override(config: ConfigDict, name: str, text: str) -> None:
    """Sets the dotted key `name` to the value of `text` in the key's type.

    Raises ValueError for a text of another type, and for an unknown key with the closest known one.
    """
    known = keys(RunConfig)
    _check_key(name, known)
    *sections, last = name.split(".")
    section: Any = config
    for part in sections:
        section = section[part]
    spec = known.get(name)
    if spec is None:  # a name in a mapping
        with section.ignore_type():
            section[last] = read_value(text)
    elif spec.is_mapping:
        with section.ignore_type():
            section[last] = ConfigDict(_typed(text, spec))
    else:
        section[last] = _typed(text, spec)


def load_config(path: str) -> ConfigDict:
    """The result of get_config() in a Python file; text after a colon is its argument.

    A relative path is searched in the working directory, then next to the installed package.
    """
    name, *argument = path.split(":", 1)
    module = _run_file(_find(name))
    if not hasattr(module, "get_config"):
        raise ValueError(
            f"{name} has no function get_config(); define one that returns a ConfigDict"
        )
    try:
        config = module.get_config(*argument)
    except (AttributeError, KeyError, TypeError) as error:
        line = traceback.extract_tb(error.__traceback__)[1].lineno
        raise ValueError(f"{name}, line {line}: {_message(error)}") from error
    if not isinstance(config, ConfigDict):
        raise ValueError(
            f"get_config() of {name} returned a {type(config).__name__}; "
            "return the edited ConfigDict of jaxrl.config.default_config()"
        )
    return config


def _split(argv: Sequence[str]) -> tuple[str | None, list[tuple[str, str]], list[str]]:
    """Config path, (key, text) overrides in order, and the other arguments."""
    path, overrides, rest = None, [], []
    known, queue = keys(RunConfig), list(argv)
    while queue:
        arg = queue.pop(0)
        if arg in ("--help", "-h", "--config.help"):
            print_help(help_text())
        if match := CONFIG.fullmatch(arg):
            path = match[1] if match[1] is not None else (queue.pop(0) if queue else None)
        elif match := OVERRIDE.fullmatch(arg):
            negated, name, text = match.groups()
            _check_key(name, known)
            if text is None:
                text = _bare_value(name, known.get(name), bool(negated), queue)
            overrides.append((name, text))
        else:
            rest.append(arg)
    return path, overrides, rest


def _check_key(name: str, known: dict[str, Key]) -> None:
    if find_key(name, known) is not None:
        return
    if inside := [key for key in known if key.startswith(name + ".")]:
        raise ValueError(f"--config.{name} is a section; set one of its keys, such as {inside[0]}")
    raise ValueError(unknown_key(name, known))


def _bare_value(name: str, spec: Key | None, negated: bool, queue: list[str]) -> str:
    """Text of an override without '=': true or false for a bool, else the next argument.

    `spec` is None for a name in a mapping.
    """
    if spec is not None and spec.type is bool:
        return "false" if negated else "true"
    if negated or not queue:
        example = "False" if spec is None else default(spec)
        raise ValueError(f"--config.{name} has no value; set --config.{name}={example}")
    return queue.pop(0)


def _typed(text: str, spec: Key) -> Any:
    """The value of a command-line text for a key of this type."""
    if spec.type is str:
        return text
    if spec.type is bool:
        text = {"1": "True", "0": "False"}.get(text, _capitalized(text))
    value = _python(text)
    if spec.type_name.startswith("tuple") and "?" in text and isinstance(value, str):
        value = (text,)  # a single task whose arguments may contain commas
    if spec.type_name.startswith("tuple") and not isinstance(value, tuple | list):
        parts = [part.strip() for part in text.split(",") if part.strip()]
        value = tuple(parts if spec.type_name == "tuple of str" else map(_python, parts))
    return convert(value, spec)


def read_value(text: str) -> Any:
    """The value of a command-line text for a name in a mapping."""
    return _python(_capitalized(text))


def _capitalized(text: str) -> str:
    """Python's spelling of true and false."""
    return text.capitalize() if text.lower() in ("true", "false") else text


def _python(text: str) -> Any:
    """The text as a Python literal, or the text itself if it is none."""
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


def shipped_file(name: str) -> pathlib.Path:
    """Where a file of the repository's configs/ is, in a clone and in an installed package."""
    package = pathlib.Path(jaxrl.__path__[0])
    installed = package / name  # the wheel has configs/ inside the package
    return installed if installed.exists() else package.parent / name


def _find(name: str) -> pathlib.Path:
    path, shipped = pathlib.Path(name), shipped_file(name)
    for candidate in (path, shipped):
        if candidate.is_file():
            return candidate
    folder = shipped_file(str(path.parent))
    known = sorted(file.name for file in folder.glob("*.py"))
    hint = f"; {folder.name}/ has {', '.join(known)}" if known else ""
    raise FileNotFoundError(f"there is no config file {name}{hint}")


def _run_file(path: pathlib.Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"config_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is no Python file; give a .py file with a function get_config()")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _message(error: Exception) -> str:
    """The message of an ml-collections error; for an unknown key, with the closest known key."""
    text = str(error.args[0]) if error.args else repr(error)
    if match := re.search(r'Key "(\w+)" does not exist', text):
        return unknown_key(match[1], keys(RunConfig))
    return text
