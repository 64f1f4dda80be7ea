"""A model's image processor: pixels to the patches that its tower reads.

The processors are those of transformers on PIL and numpy. A row of the table says what a family's
processor returns, and how its prompts have an image.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from jaxtyping import Float32
from transformers import PreTrainedTokenizerBase

from jaxrl.config.packages import install_advice
from jaxrl.data.images.decoding import (
    ImageSource,
    UnusableImageError,
    decode,
    preview,
    read_source,
)
from jaxrl.data.images.placeholders import Placeholders
from jaxrl.json_text import read_object, shown
from jaxrl.types import Grid, ImageInput

Processed = tuple[Float32[np.ndarray, "P F"], Grid, int]  # patches, their grid, tokens
Config = Mapping[str, Any]  # config.json
_NOTES = {"auto_map", "processor_class"}  # entries of processors without effect on patches
_FIXED = {"do_resize": True, "do_pan_and_scan": False}  # settings of processors


@dataclasses.dataclass(frozen=True)
class _Family:
    """The outputs of a family's processor, and the settings that it shares with the model."""

    read: Callable[[Mapping[str, Any], Config], Processed]  # of one image
    placeholders: Callable[[Config, PreTrainedTokenizerBase], Placeholders]
    options: tuple[str, ...]  # that data.image_kwargs may set
    shared: Mapping[str, str]  # name in the processor -> name in vision_config


class ImageProcessor:
    """Makes the patches of images for the model in a folder.

    `options` is data.image_kwargs, `max_pixels` data.max_image_pixels. Raises ValueError for a
    model without images, and for settings that do not belong to the model.
    """

    def __init__(self, folder: Path, options: Mapping[str, Any], max_pixels: int):
        self._config = read_object(folder / "config.json", "use the model's own file")
        self._family = _family(self._config, folder)
        self._max_pixels = max_pixels
        if unknown := sorted(set(options) - {*self._family.options}):
            raise ValueError(
                f"data.image_kwargs.{unknown[0]} is not read for a model of the type "
                f"{self._config['model_type']}; it has "
                f"{', '.join(self._family.options) or 'no such settings'}"
            )
        self._processor = _load_processor(folder, options)
        self._check_settings(folder)

    def placeholders(self, tokenizer: PreTrainedTokenizerBase) -> Placeholders:
        """How the model's prompts have an image."""
        return self._family.placeholders(self._config, tokenizer)

    def differences(self, other: "ImageProcessor") -> list[str]:
        """The settings of which the patches and tokens of an image depend, where they differ."""
        ours, theirs = self._settings(), other._settings()
        return [
            f"{name}={shown(ours.get(name))} and {shown(theirs.get(name))}"
            for name in sorted(ours.keys() | theirs.keys())
            if ours.get(name) != theirs.get(name)
        ]

    def _settings(self) -> dict[str, Any]:
        tower = self._config.get("vision_config") or {}
        of_model = {name: tower.get(name) for name in ("patch_size", "spatial_merge_size")}
        of_model["mm_tokens_per_image"] = self._config.get("mm_tokens_per_image")
        found = self._processor.to_dict() | {f"config.{k}": v for k, v in of_model.items()}
        return {name: value for name, value in found.items() if name not in _NOTES}

    def image(self, source: ImageSource, name: str) -> ImageInput:
        """The input of the model for an image; `name` is for messages.

        Raises UnusableImageError.
        """
        patches, grid, n_tokens = self._processed(source, name)
        digest = _digest(patches, grid)
        load = functools.partial(self.load, source, name, digest)
        shown = functools.partial(preview, source, name, self._max_pixels)
        whole = functools.partial(read_source, source)
        return ImageInput(grid, n_tokens, digest, load, preview=shown, encoded=whole)

    def load(self, source: ImageSource, name: str, digest: str) -> Float32[np.ndarray, "P F"]:
        """The patches of an image. Raises ValueError if they are not those of `digest`."""
        patches, grid, _ = self._processed(source, name)
        if _digest(patches, grid) != digest:
            raise ValueError(f"{name} has changed since the start of the run; restore the file")
        return patches

    def _processed(self, source: ImageSource, name: str) -> Processed:
        image = decode(read_source(source), name, self._max_pixels)
        try:
            found = self._processor(image, return_tensors="np")
        except ValueError as error:  # an extreme ratio of the sides
            reason = " ".join(str(error).split())[:200]
            raise UnusableImageError(
                f"{name} has {image.width} x {image.height} pixels, which the model's image "
                f"processor refuses ({reason})"
            ) from error
        patches, grid, n_tokens = self._family.read(found, self._config)
        return np.ascontiguousarray(patches, np.float32), grid, n_tokens

    def _check_settings(self, folder: Path) -> None:
        """Raises ValueError if the processor's settings are not those of the model's tower."""
        tower, settings = self._config.get("vision_config") or {}, self._processor.to_dict()
        for ours, theirs in self._family.shared.items():
            value, expected = _entry(settings, ours), tower.get(theirs)
            if expected is not None and value != expected:
                raise ValueError(
                    f"the image processor of {folder} has {ours}={shown(value)}, and its "
                    f"config.json has vision_config.{theirs}={shown(expected)}; use the files of "
                    "one model"
                )
        for name, supported in _FIXED.items():
            if bool(found := settings.get(name, supported)) != supported:
                raise ValueError(
                    f"the image processor of {folder} has {name}={found}; only {supported} is "
                    "supported. Correct preprocessor_config.json"
                )
        least, most = (_entry(settings, f"size.{edge}_edge") for edge in ("shortest", "longest"))
        if least and most and least > most:
            raise ValueError(
                f"the image processor of {folder} has min_pixels={least} and max_pixels={most}; "
                "set both in data.image_kwargs, min_pixels to the smaller one"
            )


def _family(config: Config, folder: Path) -> _Family:
    if (kind := config.get("model_type")) not in FAMILIES:
        raise ValueError(
            f"the model in {folder} is of the type {shown(kind)}, which reads text only; for "
            f"images use a model of the types {', '.join(FAMILIES)}"
        )
    return FAMILIES[kind]


def _load_processor(folder: Path, options: Mapping[str, Any]) -> Any:
    try:
        import PIL  # noqa: F401  an extra: only images need it
    except ImportError as error:
        raise ValueError(
            f"images need the package pillow; install it with {install_advice('vision')}"
        ) from error
    try:
        return transformers.AutoImageProcessor.from_pretrained(
            folder, backend="pil", local_files_only=True, trust_remote_code=False, **options
        )
    except Exception as error:  # transformers raises many types
        reason = " ".join(str(error).split())[:300]
        raise ValueError(
            f"the image processor in {folder} cannot be loaded ({reason}); copy "
            "preprocessor_config.json of the model into it, and correct data.image_kwargs"
        ) from error


def _entry(settings: Mapping[str, Any], name: str) -> Any:
    """The value of a dotted name; None if the settings do not have it."""
    value: Any = settings
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _digest(patches: np.ndarray, grid: Grid) -> str:
    """Hash of the content of an image: equal for images that the model cannot tell apart."""
    found = hashlib.sha256(np.array(grid, np.int64).tobytes())
    found.update(patches.tobytes())
    return found.hexdigest()


def _read_qwen(found: Mapping[str, Any], config: Config) -> Processed:
    """Patches in blocks of merged ones; features in the order channel, time, height, width."""
    t, h, w = map(int, found["image_grid_thw"][0])
    merge = config["vision_config"].get("spatial_merge_size", 2)
    return found["pixel_values"], (t, h, w), t * h * w // merge**2


def _read_gemma3(found: Mapping[str, Any], config: Config) -> Processed:
    """Patches by row and column; features in the order channel, height, width."""
    pixels = found["pixel_values"][0]
    size = config["vision_config"].get("patch_size", 14)
    channels, h, w = pixels.shape[0], pixels.shape[1] // size, pixels.shape[2] // size
    blocks = pixels.reshape(channels, h, size, w, size).transpose(1, 3, 0, 2, 4)
    return blocks.reshape(h * w, -1), (1, h, w), config.get("mm_tokens_per_image", 256)


def _read_gemma4(found: Mapping[str, Any], config: Config) -> Processed:
    """Patches by row and column; features in the order height, width, channel."""
    columns_rows = found["image_position_ids"][0]
    n = int((columns_rows[:, 0] >= 0).sum())  # the others are padding
    w, h = (int(size) for size in columns_rows[:n].max(axis=0) + 1)
    return found["pixel_values"][0, :n], (1, h, w), int(found["num_soft_tokens_per_image"][0])


def _qwen_placeholders(config: Config, tokenizer: PreTrainedTokenizerBase) -> Placeholders:
    token, text = _token("image_token_id", config, tokenizer)
    return Placeholders(text, text, token, config["vision_config"].get("spatial_merge_size", 2))


def _gemma3_placeholders(config: Config, tokenizer: PreTrainedTokenizerBase) -> Placeholders:
    token, text = _token("image_token_index", config, tokenizer)
    (_, begin), (_, end) = (
        _token(name, config, tokenizer) for name in ("boi_token_index", "eoi_token_index")
    )
    return Placeholders(begin, f"\n\n{begin}{text}{end}\n\n", token)


def _gemma4_placeholders(config: Config, tokenizer: PreTrainedTokenizerBase) -> Placeholders:
    token, text = _token("image_token_id", config, tokenizer)
    (_, begin), (_, end) = (
        _token(name, config, tokenizer) for name in ("boi_token_id", "eoi_token_id")
    )
    return Placeholders(text, begin + text + end, token)


def _token(name: str, config: Config, tokenizer: PreTrainedTokenizerBase) -> tuple[int, str]:
    """(id, text) of a token that config.json names; transformers 5 writes _id for _index."""
    token = config.get(name, config.get(name.replace("_index", "_id")))
    text = tokenizer.convert_ids_to_tokens(token) if type(token) is int else None
    if type(token) is not int or not isinstance(text, str):
        raise ValueError(
            f"config.json has {name}={shown(token)}, which is no token of the tokenizer; use the "
            "files of one model"
        )
    return token, text


_QWEN = _Family(
    read=_read_qwen,
    placeholders=_qwen_placeholders,
    options=("min_pixels", "max_pixels"),
    shared={
        "patch_size": "patch_size",
        "merge_size": "spatial_merge_size",
        "temporal_patch_size": "temporal_patch_size",
    },
)
_GEMMA3 = _Family(
    read=_read_gemma3,
    placeholders=_gemma3_placeholders,
    options=(),
    shared={"size.height": "image_size", "size.width": "image_size"},
)
_GEMMA4 = _Family(
    read=_read_gemma4,
    placeholders=_gemma4_placeholders,
    options=("max_soft_tokens",),
    shared={"patch_size": "patch_size", "pooling_kernel_size": "pooling_kernel_size"},
)
FAMILIES = {  # model_type of config.json -> family
    "qwen2_5_vl": _QWEN,
    "qwen3_vl": _QWEN,
    "qwen3_vl_moe": _QWEN,
    "qwen3_5": _QWEN,
    "qwen3_5_moe": _QWEN,
    "gemma3": _GEMMA3,
    "gemma4": _GEMMA4,
}
