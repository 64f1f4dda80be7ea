"""The config file that a migration writes, and the checks that it passes."""

import json
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl.config.keys import RunConfig
from jaxrl.config.resolve import resolve
from jaxrl.config.schema import Key, keys, to_dict


def check(
    config: Mapping[str, Any], n_devices: int | None, n_processes: int
) -> tuple[list[str], list[str]]:
    """The errors and the warnings of the checks of a config with these keys set."""
    tree, known = to_dict(RunConfig()), keys(RunConfig)
    for name, value in config.items():
        *parts, last = name.split(".")
        section: Any = tree
        for part in parts:
            section = section[part]
        section[last] = _converted(value, known[name])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            resolve(tree, n_devices=n_devices, n_processes=n_processes)
        except ValueError as error:
            return [line.removeprefix("  - ") for line in str(error).splitlines()[1:]], []
    return [], [str(one.message) for one in caught]


def _converted(value: Any, spec: Key) -> Any:
    if spec.type is str and not isinstance(value, str):
        return str(value)
    if spec.type is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return value


def text(config: Mapping[str, Any], source: str, command: str, notes: Sequence[str]) -> str:
    """A config file that sets what differs from the defaults of jaxrl."""
    lines = [f'"""Migrated from {source}.', "", f"    {command}"]
    lines += ['"""', "", "from ml_collections import ConfigDict", ""]
    lines += ["from jaxrl.config import default_config", "", ""]
    lines += ["def get_config() -> ConfigDict:"]
    lines += [f"    # {note}" for note in notes]
    lines += ["    config = default_config()"]
    for name, spec in keys(RunConfig).items():
        value = _converted(config.get(name, spec.default), spec)
        if value != spec.default:
            lines.append(f"    config.{name} = {_literal(value)}")
    return "\n".join([*lines, "    return config", ""])


def _literal(value: Any) -> str:
    """Python source of a value, with double quotes as the other config files have them."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, tuple):
        return f"({', '.join(map(_literal, value))}{',' * (len(value) == 1)})"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_literal(k)}: {_literal(v)}' for k, v in value.items())}}}"
    return repr(value)
