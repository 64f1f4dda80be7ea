"""The form of an export: the class of the model, its names in files, and the tensors it copies.

A language model that is a part of an image-and-text model is exported as the whole: with the names
and the joined experts of the source's files, and the tower, the projector and all other parts
copied. It loads in the class of transformers that the source's config.json names.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

from jaxrl.json_text import read_object
from jaxrl.models.config import DecoderConfig
from jaxrl.models.files.fused_experts import INTERLEAVED, JOINED
from jaxrl.models.files.hf_config import ADVICE, IMAGE_AND_TEXT, config_path
from jaxrl.models.files.quantized.tensors import FileTensor
from jaxrl.models.files.weight_files import (
    PREFIXES,
    is_parameter,
    kept_tensors,
    language_name,
    named_infos,
    other_tensors,
)
from jaxrl.models.vision.names import common_name, is_of_tower


def same_name(name: str) -> str:
    return name


@dataclasses.dataclass(frozen=True)
class ExportForm:
    """Names of the parameters in the files of an export, and the tensors copied next to them."""

    whole: bool = False  # the image-and-text model; else the language model alone, or a classifier
    joined: bool = False  # all experts of a layer are one tensor
    interleaved: bool = False  # gate and up in turns there
    file_name: Callable[[str], str] = same_name  # of a parameter, from that in a text-only model
    copied: Mapping[str, FileTensor] = dataclasses.field(default_factory=dict)  # by name in files


def export_form(cfg: DecoderConfig, source: Path | None, *, text_only: bool = False) -> ExportForm:
    """The form of an export of the decoder, which is of the model folder `source`.

    `text_only` asks for the language model alone. A classifier has no use for other parts.
    """
    interleaved = cfg.family in INTERLEAVED
    form = ExportForm(joined=interleaved or cfg.family in JOINED, interleaved=interleaved)
    if source is None or "vocab" not in cfg.heads:
        return form
    form = dataclasses.replace(form, copied=copied_tensors(source, text_only=text_only))
    if text_only or not is_image_and_text(source):
        return form
    names = file_names(source)
    joined = any(".experts.gate_up_proj" in name and is_parameter(name) for name in names)
    return dataclasses.replace(
        form, whole=True, joined=form.joined or joined, file_name=namer(names)
    )


def is_image_and_text(folder: Path) -> bool:
    """Whether the config.json of a model folder is of a model whose language model is a part."""
    return str(read_object(config_path(folder), ADVICE).get("model_type")) in IMAGE_AND_TEXT


def copied_tensors(folder: Path, *, text_only: bool = False) -> dict[str, FileTensor]:
    """The tensors of a model folder that an export of its language model copies unchanged.

    They are under their names in files. Of an image-and-text model these are all that are no
    parameters of the language model; else, and with `text_only`, the drafter's.
    """
    if text_only or not is_image_and_text(folder):
        return kept_tensors(folder)
    name_of = namer(file_names(folder))
    return {name_of(name): info for name, info in other_tensors(folder).items()}


def file_names(folder: Path) -> dict[str, str]:
    """Names in a text-only checkpoint -> names in the files of a folder."""
    return {language_name(stored): stored for stored, _ in named_infos(folder)}


def namer(names: Mapping[str, str]) -> Callable[[str], str]:
    """The name in files of a tensor, also of one that they have in several parts or joined."""
    prefixes = [
        (prefix, instead)
        for prefix, instead in PREFIXES
        if any(stored.startswith(prefix) for stored in names.values())
    ]
    prefix, instead = prefixes[0] if prefixes else ("", "")
    of_tower = {common_name(stored): stored for stored in names.values() if is_of_tower(stored)}

    def name_of(name: str) -> str:
        if is_of_tower(name):
            return of_tower.get(common_name(name), name)
        if name in names or not name.startswith(instead):
            return names.get(name, name)
        return prefix + name.removeprefix(instead)

    return name_of


def whole_name(name: str) -> str:
    """A tensor's name in transformers' class of an image-and-text model."""
    prefix = "model."
    if is_of_tower(name):
        return name if name.startswith(prefix) else prefix + name
    return f"model.language_model.{name.removeprefix(prefix)}" if name.startswith(prefix) else name
