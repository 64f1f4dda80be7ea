"""Config files: Python with a function get_config(), run and checked; config.json of a run."""

import ast
import importlib.util
import pathlib
import re
import traceback
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

import jaxrl
from jaxrl.config.keys import RunConfig
from jaxrl.config.resolve import default_config
from jaxrl.config.saved import from_json
from jaxrl.config.schema import convert, find_key, keys, to_dict, type_text, unknown_key


def load_config(path: str) -> ConfigDict:
    """The result of get_config() in a Python file; text after a colon is its argument.

    A file config.json of a run folder is the config of that run. A relative path is searched in the
    working directory, then next to the installed package. Raises one ValueError for all keys that
    do not exist and all literals of a wrong type.
    """
    name, *argument = path.split(":", 1)
    file = _find(name)
    if file.suffix == ".json":
        config = default_config()
        config.update(to_dict(from_json(file.read_text())))
        return config
    module = _run_file(file)
    if not hasattr(module, "get_config"):
        raise ValueError(
            f"{name} has no function get_config(); define one that returns a ConfigDict"
        )
    try:
        config = module.get_config(*argument)
    except (AttributeError, KeyError, TypeError) as error:
        line = traceback.extract_tb(error.__traceback__)[1].lineno or 0
        wrong = sorted(({line: _message(error)} | _wrong_lines(file)).items())
        lines = [f"line {number}: {message}" for number, message in wrong]
        several = f" has {len(lines)} wrong lines:\n    " if len(lines) > 1 else ", "
        raise ValueError(name + several + "\n    ".join(lines)) from error
    if not isinstance(config, ConfigDict):
        raise ValueError(
            f"get_config() of {name} returned a {type(config).__name__}; "
            "return the edited ConfigDict of jaxrl.config.default_config()"
        )
    return config


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
    folder = shipped_file(str(path.parent) if path.parent.name else "configs")
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


def _wrong_lines(file: pathlib.Path) -> dict[int, str]:
    """Line -> error of the assignments `config.learner.lr = 1e-6` to what get_config() returns.

    A name of a section, as in `learner = config.learner`, stands for it until it is assigned again.
    """
    tree, known, wrong = ast.parse(file.read_text()), keys(RunConfig), {}
    returned = (n.value for n in ast.walk(tree) if isinstance(n, ast.Return) and n.value)
    names = {ast.unparse(value): "" for value in returned}  # name in the file -> section
    assignments = [node for node in ast.walk(tree) if isinstance(node, ast.Assign)]
    for node in sorted(assignments, key=lambda node: node.lineno):
        for target in node.targets:
            name = _key(target, names)
            if name and (error := _error(name, known, node.value)):
                wrong[node.lineno] = error
            section = _key(node.value, names)
            if isinstance(target, ast.Name) and section and _is_section(section, known):
                names[target.id] = section
            elif isinstance(target, ast.Name) and names.get(target.id):
                del names[target.id]
    return wrong


def _key(node: ast.expr, names: dict[str, str]) -> str | None:
    """The key that an expression such as `config.learner.lr` names; None if it names none."""
    root, _, name = ast.unparse(node).partition(".")
    return ".".join(part for part in (names[root], name) if part) if root in names else None


def _is_section(name: str, known: Mapping[str, Any]) -> bool:
    return any(key.startswith(f"{name}.") for key in known)


def _error(name: str, known: Mapping[str, Any], value: ast.expr) -> str | None:
    spec = find_key(name, known)
    if _is_section(name, known) or (spec is not None and spec.is_mapping):
        return None
    if spec is None:
        return unknown_key(name, known)
    try:
        literal = ast.literal_eval(value)
    except ValueError:  # computed
        return None
    try:
        convert(literal, spec)
    except ValueError as error:
        return str(error)


def _message(error: Exception) -> str:
    """The message of an ml-collections error, with the key that was meant or the type it needs."""
    text, known = str(error.args[0]) if error.args else repr(error), keys(RunConfig)
    if match := re.search(r'Key "(\w+)" does not exist', text):
        return unknown_key(match[1], known)
    if match := re.search(r"override field '(\w+)'", text):
        meant = [spec for name, spec in known.items() if name.split(".")[-1] == match[1]]
        names = " or ".join(spec.name for spec in meant)
        return f"a value of another type for {names}; set {type_text(meant[0])}" if meant else text
    return text
