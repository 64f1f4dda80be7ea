"""The command line of every entry point: a config file, typed overrides, help.

    python -m jaxrl.train --config=configs/quickstart.py --config.rollout.n=16

`--config=file.py:argument` calls get_config("argument"). `--config.help` lists every key.
"""

import ast
import copy
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ml_collections import ConfigDict

from jaxrl.config.config_file import load_config
from jaxrl.config.help import USAGE, default, help_text
from jaxrl.config.keys import RunConfig
from jaxrl.config.resolve import default_config, raise_errors, resolve
from jaxrl.config.schema import (
    Key,
    convert,
    find_key,
    key_hint,
    keys,
    nearest,
    to_dict,
    unknown_key,
)

OVERRIDE = re.compile(r"--?(no)?config\.([^=]+)(?:=(.*))?", re.DOTALL)
CONFIG = re.compile(r"--?config(?:=(.*))?", re.DOTALL)


def parse(argv: Sequence[str]) -> RunConfig:
    """The checked run described by the arguments of a program (sys.argv[1:]).

    Exits after printing the keys for --help and --config.help, and with one message and status 1 on
    any error.
    """
    config, rest, errors = _read(argv, None)
    known = keys(RunConfig)
    for argument in rest:
        name = argument.lstrip("-+").split("=")[0]
        is_key = name in known
        hint = f"did you mean --config.{name}?" if is_key else key_hint(name, known, "--config.")
        errors.append(f"unknown argument {argument}; {hint}")
    if rest:
        errors[-1] += f"; {USAGE}"
    if errors:
        stop(*errors)
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
    config, rest, errors = _read(argv, config)
    if errors:
        stop(*errors)
    return config, rest


def _read(
    argv: Sequence[str], config: ConfigDict | None
) -> tuple[ConfigDict, list[str], list[str]]:
    """As `read_args`, with all errors."""
    path, overrides, rest, errors = _split(argv)
    if path is None and config is None:
        errors.append(f"no config file is given; {USAGE}")
    elif path is not None:
        try:
            config = load_config(path)
        except (ValueError, FileNotFoundError) as error:
            errors.append(str(error))
    config = default_config() if config is None else config
    for name, text in overrides:
        try:
            override(config, name, text)
        except ValueError as error:
            errors.append(str(error))
    return config, rest, errors


def read_options(arguments: Sequence[str], known: Sequence[str]) -> dict[str, str]:
    """{name: text} of an entry point's additional arguments, --name=text or a bare --name ("").

    Exits with one message for all arguments that are not in `known`.
    """
    options, errors = {}, []
    for argument in arguments:
        name, _, options[name] = argument.lstrip("-").partition("=")
        if name not in known:
            guess = nearest(name, known)
            hint = f"did you mean --{guess}? " if guess else ""
            listed = ", --".join(known)
            errors.append(
                f"unknown argument {argument}; {hint}known: --{listed}; --help explains them"
            )
    if errors:
        stop(*errors)
    return options


def print_help(text: str) -> NoReturn:
    """Prints a help text and ends the program, also if the reader of a pipe has ended."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise SystemExit(0)


def stop(message: str, *more: str) -> NoReturn:
    """Ends the program with messages instead of a traceback."""
    if more:
        message = "\n  - ".join(("these arguments are invalid:", message, *more))
    raise SystemExit(f"error: {message}")


def override(config: ConfigDict, name: str, given: Any) -> None:
    """Sets the dotted key `name` to a value of the key's type, given as it is or as text.

    Raises ValueError for a value of another type, and for an unknown key with the closest known
    one.
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
            section[last] = read_value(given) if isinstance(given, str) else given
        return
    value = _typed(given, spec) if isinstance(given, str) else convert(given, spec)
    if spec.is_mapping:
        with section.ignore_type():
            section[last] = ConfigDict(value)
    else:
        section[last] = value


def config_of(source: Any, overrides: Mapping[str, Any]) -> ConfigDict:
    """A copy of the config that `source` names or is, with dotted keys set to other values.

    `source` is a config file, the name of a file in configs/ ("quickstart"), a run's config.json, a
    ConfigDict or a run's config. Raises one ValueError for all wrong overrides.
    """
    match source:
        case ConfigDict():
            config = copy.deepcopy(source)
        case RunConfig():
            config = default_config()
            config.update(to_dict(source))
        case str() | Path() if Path(source).suffix:
            config = load_config(str(source))
        case str() | Path():
            config = load_config(f"configs/{source}.py")
        case _:
            raise ValueError(
                f"the config is a {type(source).__name__}; give the path of a config file, or the "
                "ConfigDict of jaxrl.config.default_config()"
            )
    errors = []
    for name, value in overrides.items():
        try:
            override(config, name, value)
        except ValueError as error:
            errors.append(str(error))
    raise_errors(errors)
    return config


def _split(
    argv: Sequence[str],
) -> tuple[str | None, list[tuple[str, str]], list[str], list[str]]:
    """Config path, (key, text) overrides in order, the other arguments, and errors."""
    path, overrides, rest, errors = None, [], [], []
    known, queue = keys(RunConfig), list(argv)
    while queue:
        arg = queue.pop(0)
        if arg in ("--help", "-h", "--config.help"):
            print_help(help_text())
        if match := CONFIG.fullmatch(arg):
            if path is not None:
                errors.append(f"--config is given twice, the first time as {path}; give one file")
            path = match[1] if match[1] is not None else (queue.pop(0) if queue else None)
        elif match := OVERRIDE.fullmatch(arg):
            negated, name, text = match.groups()
            try:
                _check_key(name, known)
                if text is None:
                    text = _bare_value(name, known.get(name), bool(negated), queue)
                overrides.append((name, text))
            except ValueError as error:
                errors.append(str(error))
                if text is None and queue and not queue[0].startswith("-"):
                    queue.pop(0)  # the value of an unknown key
        else:
            rest.append(arg)
    return path, overrides, rest, errors


def _check_key(name: str, known: Mapping[str, Key]) -> None:
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
