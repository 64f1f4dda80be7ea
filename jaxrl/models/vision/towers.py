"""The vision tower of a Hugging Face folder's config.json."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxrl.json_text import read_object, shown
from jaxrl.models.config import DecoderConfig
from jaxrl.models.families.entries import check_known
from jaxrl.models.files.hf_config import ADVICE, config_path
from jaxrl.models.files.hf_entries import is_list_of, is_number, wrong
from jaxrl.models.vision import gemma3, gemma4, qwen2_5_vl, qwen3_vl
from jaxrl.models.vision.config import TowerConfig

# `model_type` of an image-and-text model -> the module that reads its vision_config.
TOWERS = dict.fromkeys(qwen3_vl.FAMILIES, qwen3_vl) | {
    "qwen2_5_vl": qwen2_5_vl,
    "gemma3": gemma3,
    "gemma4": gemma4,
}
MAX_SIZE, MAX_LAYERS = 2**24, 1000  # a damaged file must not cost memory


def folder_tower(folder: str | Path) -> TowerConfig | None:
    """The tower of a model folder; None for a model without one, or with an unknown one.

    Raises ValueError, with the file's name, for entries that are not understood.
    """
    return _read_tower(config_path(folder))


def known_tower(path: Path) -> TowerConfig:
    """The tower of a model folder or config.json. Raises ValueError if it has no known one."""
    if (cfg := _read_tower(config_path(path) if path.is_dir() else path)) is None:
        raise ValueError(
            f"{path} has no vision tower of a known kind; model types with one: {', '.join(TOWERS)}"
        )
    return cfg


def with_trained_tower(
    decoder: DecoderConfig, tower: TowerConfig | None, freeze_vision: str
) -> DecoderConfig:
    """The decoder with the tower as a part if config.model.freeze_vision lets training change it.

    "all" is frozen, the "tower" below its projector, or "none".
    """
    if tower is None or freeze_vision == "all":
        return decoder
    trained = dataclasses.replace(tower, frozen=freeze_vision == "tower")
    return dataclasses.replace(decoder, tower=trained)


def _read_tower(path: Path) -> TowerConfig | None:
    config = read_object(path, ADVICE)
    if not config.get("vision_config") or config.get("model_type") not in TOWERS:
        return None
    try:
        return tower_from_hf(config)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def tower_from_hf(config: Mapping[str, Any]) -> TowerConfig:
    """The tower that a config.json describes.

    Raises ValueError for model types without a known tower, and for entries that may change the
    numbers and are not read.
    """
    model_type, vision = str(config.get("model_type")), config["vision_config"]
    if model_type not in TOWERS:
        raise ValueError(
            f"the vision tower of model_type {model_type!r} is not known; known: "
            f"{', '.join(TOWERS)}"
        )
    module = TOWERS[model_type]
    if not isinstance(vision, dict):
        raise ValueError(f"vision_config is {shown(vision)}, expected an object; {ADVICE}")
    if (found := vision.get("model_type", module.VISION_TYPES[0])) not in module.VISION_TYPES:
        known = " or ".join(module.VISION_TYPES)
        raise ValueError(f"model_type of vision_config is {found!r}; {known} is supported")
    check_known({k: v for k, v in vision.items() if k != "architectures"}, module.ENTRIES, found)
    check_types(vision, module.DEFAULTS)
    cfg = dataclasses.replace(module.from_hf(config), token=image_token(config))
    check_sizes(cfg)
    return cfg


def image_token(config: Mapping[str, Any]) -> int:
    """The placeholder of the tokens of an image; Gemma 3 names it image_token_index."""
    name = "image_token_index" if "image_token_index" in config else "image_token_id"
    if type(token := config.get(name)) is not int or token < 0:
        raise wrong(name, token, "the number of a token")
    return token


def check_types(vision: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Raises ValueError for the first entry of another type than its default, or a size of none."""
    for name, default in defaults.items():
        value = vision.get(name, default)
        if isinstance(default, bool):
            if not isinstance(value, bool):
                raise wrong(name, value, "true or false")
        elif isinstance(default, int) and (type(value) is not int or not 0 < value <= MAX_SIZE):
            raise wrong(name, value, f"an integer from 1 to {MAX_SIZE}")
        if isinstance(default, float) and not is_number(value):
            raise wrong(name, value, "a number")
        if isinstance(default, str) and not isinstance(value, str):
            raise wrong(name, value, "a string")
    for name in ("fullatt_block_indexes", "deepstack_visual_indexes"):
        if not is_list_of(int, vision.get(name, [])):
            raise wrong(name, vision[name], "a list of integers")
    if not isinstance(rope := vision.get("rope_parameters") or {}, dict):
        raise wrong("rope_parameters", rope, "an object")


def check_sizes(cfg: TowerConfig) -> None:
    """Raises ValueError if the sizes of a tower contradict each other."""
    errors = []
    if cfg.attn.theta is not None and cfg.attn.H % 4:
        errors.append(f"heads of {cfg.attn.H} features have no equal pairs for rows and columns")
    if cfg.L > MAX_LAYERS:
        errors.append(f"{cfg.L} blocks are more than {MAX_LAYERS}")
    if len({i for i in cfg.deepstack if 0 <= i < cfg.L}) < len(cfg.deepstack):
        errors.append(f"deepstack reads the blocks {list(cfg.deepstack)} of {cfg.L}")
    if errors:
        raise ValueError(f"vision_config: {'; '.join(errors)}; {ADVICE}")


def tower_to_hf(cfg: TowerConfig) -> dict[str, Any]:
    """The entries of config.json from which `tower_from_hf` reads `cfg`, except adapters."""
    own = dict(model_type=cfg.family, image_token_id=cfg.token)
    return own | TOWERS[cfg.family].to_hf(cfg)
