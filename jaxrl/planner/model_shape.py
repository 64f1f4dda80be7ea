"""The shape of a model from its config.json alone, without weights or downloads."""

import pathlib

from jaxrl.config.config_file import shipped_file
from jaxrl.models.config import DecoderConfig
from jaxrl.models.files.hf_config import read_decoder_config
from jaxrl.models.vision.config import TowerConfig
from jaxrl.models.vision.towers import known_tower

SHAPES = shipped_file("configs/shapes")


def model_shape(
    path: str, config_file: str = "", *, option: str = "--model-config"
) -> DecoderConfig:
    """The decoder config of the model at `path`; configs/shapes has configs of well-known models.

    `config_file` is a config.json or its folder, for a model that is not on this machine.
    Raises ValueError if the config.json is malformed or missing, then with `option` as the remedy.
    """
    file = _find(pathlib.Path(config_file or path).expanduser(), bool(config_file), option)
    return read_decoder_config(file)


def tower_shape(path: str, config_file: str = "") -> TowerConfig:
    """The vision tower of the model, whose config.json is found as `model_shape` finds it.

    Raises ValueError if the model has no tower that is known.
    """
    found = pathlib.Path(config_file or path).expanduser()
    return known_tower(_find(found, bool(config_file), "--model-config"))


def _find(path: pathlib.Path, explicit: bool, option: str) -> pathlib.Path:
    if path.is_file() and path.suffix == ".json":
        return path
    if (path / "config.json").is_file():
        return path / "config.json"
    shipped = SHAPES / f"{path.name.removeprefix('package:')}.json"
    if not explicit and shipped.is_file():
        return shipped
    known = ", ".join(sorted(file.stem for file in SHAPES.glob("*.json")))
    raise ValueError(
        f"there is no config.json at {path}; set {option} to that file or its folder "
        f"(shipped shapes: {known})"
    )
