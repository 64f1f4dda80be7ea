"""The shape of a model from its config.json alone: no weights, no downloads."""

import json
import pathlib

import jaxrl
from jaxrl.models.config import DecoderConfig
from jaxrl.models.files.hf_config import config_from_hf

SHAPES = pathlib.Path(jaxrl.__path__[0]).parent / "configs" / "shapes"


def model_shape(
    path: str, config_file: str = "", *, instead: str = "--model-config"
) -> DecoderConfig:
    """The decoder of a model; `config_file` is a config.json or its folder where the model is not on this
    machine, `instead` what to set to one.

    Shapes of well-known models lie in configs/shapes. Raises ValueError where there is no config.json.
    """
    file = _find(pathlib.Path(config_file or path).expanduser(), bool(config_file), instead)
    try:
        return config_from_hf(json.loads(file.read_text()))
    except json.JSONDecodeError as problem:
        raise ValueError(f"{file} is no JSON: {problem}") from problem


def _find(path: pathlib.Path, named: bool, instead: str) -> pathlib.Path:
    if path.is_file() and path.suffix == ".json":
        return path
    if (path / "config.json").is_file():
        return path / "config.json"
    shipped = SHAPES / f"{path.name.removeprefix('package:')}.json"
    if not named and shipped.is_file():
        return shipped
    known = ", ".join(sorted(file.stem for file in SHAPES.glob("*.json")))
    raise ValueError(
        f"there is no config.json at {path}; set {instead} to that file or its folder "
        f"(known without one: {known})"
    )
