"""The safetensors files of a model folder, and the tensors of the language model in them.

As transformers does, a folder's weights are those in model.safetensors, or those that its index
names. Other weight files in the folder, such as adapters or the state of an optimizer, are not part
of the model.
"""

import functools
import re
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl.json_text import read_object
from jaxrl.models.files.fused_experts import has_interleaved_experts, separate_experts
from jaxrl.models.files.quantized.pairing import pair_tensors
from jaxrl.models.files.quantized.scheme import folder_scheme
from jaxrl.models.files.quantized.tensors import FileTensor, read_tensor
from jaxrl.models.files.safetensors import FLOATS, TensorInfo, read_header

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FILE_NAME = r"[\w.,=+-]+\.safetensors"
SHARD = r"model-\d{5}-of-\d{5}\.safetensors"
OTHER_FORMATS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.gguf", "*.npz")
ADVICE = "download or export the model again"

# Image-and-text checkpoints store the language model under a prefix, next to other parts.
PREFIXES = (("language_model.", ""), ("model.language_model.", "model."))
# Parts that have no parameters of the language model, by the start of their names without "model.",
# and whether an export of the language model alone has them too. Every other tensor is a parameter
# or refused.
OTHER_PARTS = {
    "mtp.": True,  # the drafter, which predicts several tokens; transformers does not run it
    "vision_tower.": False,  # only in an export of the image-and-text model
    "multi_modal_projector.": False,
    "visual.": False,
    "vision_adapter.": False,
    "vision_projection.": False,
    "embed_vision.": False,
    "vision_embedder.": False,
    "audio_tower.": False,
    "embed_audio.": False,
}
MAX_DRAFTER_LAYERS = MAX_SHARED_LAYERS = 1000  # a damaged config.json must not cost memory
COMPUTED = ("rotary_emb.inv_freq",)  # buffers that follow from config.json
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
COMPARED_ROWS = 4096  # of two tables at a time


def find_tensors(folder: Path) -> dict[str, FileTensor]:
    """The language model's tensors in a folder's weight files, by name.

    The layers of a drafter are not among them (`drafter_layers`).

    Raises ValueError, with the names, for missing files or shards, for an index that differs from
    its files, for a tensor that occurs twice, and for tensors that are not floating-point numbers.
    """
    tensors: dict[str, FileTensor] = {}
    interleaved, unused = has_interleaved_experts(folder), unused_layers(folder)
    for name, info in all_tensors(folder):
        if not is_parameter(name) or name.startswith(unused):
            continue
        if info.dtype not in FLOATS:
            raise ValueError(
                f"{info.path} stores {name} as {info.dtype}, which are not weights but the codes "
                "of a quantization; use a checkpoint that is not quantized"
            )
        for part, place in separate_experts(name, info, interleaved=interleaved).items():
            add_once(tensors, part, place)
    return tensors


def other_tensors(folder: Path) -> dict[str, FileTensor]:
    """All tensors of a folder that `find_tensors` leaves out, by their names in a text-only model.

    Raises ValueError as `find_tensors`.
    """
    tensors: dict[str, FileTensor] = {}
    unused = unused_layers(folder)
    for name, info in all_tensors(folder):
        if not is_parameter(name) or name.startswith(unused):
            add_once(tensors, name, info)
    return tensors


def frozen_parts(folder: Path) -> list[str]:
    """The names of the tensors of a vision tower and of the other parts that are never trained."""
    return [name for name in other_tensors(folder) if not (is_parameter(name) or is_kept(name))]


def unused_layers(folder: Path) -> tuple[str, ...]:
    """Starts of the names of a drafter's layers and of unused keys and values."""
    return (*drafter_layers(folder), *shared_kv_parts(folder))


def skipped_parts(folder: Path) -> dict[str, int]:
    """Parts of an image-and-text model next to the language model, and their number of tensors."""
    names = [name.removeprefix("model.") for name, _ in all_tensors(folder)]
    parts = [part for part, kept in OTHER_PARTS.items() if not kept]
    counts = {part: sum(name.startswith(part) for name in names) for part in parts}
    return {part.rstrip("."): n for part, n in counts.items() if n}


def kept_tensors(folder: Path) -> dict[str, FileTensor]:
    """The tensors that an export of the language model alone copies unchanged, by name.

    Raises ValueError as `find_tensors`.
    """
    tensors: dict[str, FileTensor] = {}
    drafter = drafter_layers(folder)
    for name, info in all_tensors(folder):
        if is_kept(name) or name.startswith(drafter):
            add_once(tensors, name, info)
    return tensors


def drafter_layers(folder: Path) -> tuple[str, ...]:
    """Starts of the names of a drafter's tensors, which has its layers after those of the model.

    `num_nextn_predict_layers` in config.json, or `num_mtp_layers`, is their number. transformers
    does not load them.
    """
    path = folder / "config.json"
    config = read_object(path, ADVICE) if path.exists() else {}
    n_layers = config.get("num_nextn_predict_layers", config.get("num_mtp_layers"))
    first = config.get("num_hidden_layers")
    if type(first) is not int or type(n_layers) is not int:
        return ()
    return tuple(f"model.layers.{first + i}." for i in range(min(n_layers, MAX_DRAFTER_LAYERS)))


def shared_kv_parts(folder: Path) -> tuple[str, ...]:
    """Starts of the names of keys and values of layers that use those of an earlier layer.

    Published files of Gemma 4 have them; transformers does not load them. `num_kv_shared_layers`
    is the number of these layers, the last ones.
    """
    path = folder / "config.json"
    config = read_object(path, ADVICE) if path.exists() else {}
    text = config.get("text_config")
    config = text if isinstance(text, dict) else config
    n_layers, n_shared = config.get("num_hidden_layers"), config.get("num_kv_shared_layers")
    if type(n_layers) is not int or type(n_shared) is not int:
        return ()
    return tuple(
        f"model.layers.{n_layers - 1 - i}.self_attn.{part}."
        for i in range(min(n_layers, n_shared, MAX_SHARED_LAYERS))
        for part in ("k_proj", "v_proj", "k_norm", "v_norm")
    )


def all_tensors(folder: Path) -> Iterable[tuple[str, FileTensor]]:
    """All tensors in a folder's weight files, by their names in a text-only checkpoint.

    Those of quantized matrices are joined (`pair_tensors`).
    """
    scheme = folder_scheme(folder)
    if scheme is None:
        return stored_tensors(folder)
    stored: dict[str, TensorInfo] = {}
    for name, info in stored_tensors(folder):
        add_once(stored, name, info)
    return pair_tensors(stored, scheme).items()


def stored_tensors(folder: Path) -> Iterator[tuple[str, TensorInfo]]:
    """The tensors as the files have them, by their names in a text-only checkpoint."""
    return ((language_name(stored), info) for stored, info in named_infos(folder))


def named_infos(folder: Path) -> Iterator[tuple[str, TensorInfo]]:
    """The tensors as the files have them, by their names there."""
    headers = {file: read_header(file) for file in weight_files(folder)}
    if (index := folder / INDEX).exists():
        check_index(index, headers)
    for header in headers.values():
        yield from header.items()


def add_once[T: FileTensor](tensors: dict[str, T], name: str, info: T) -> None:
    """Adds a tensor. Raises ValueError if there is one of this name."""
    if name in tensors:
        raise ValueError(
            f"{info.path.parent} has {name} twice, in {tensors[name].path.name} and in "
            f"{info.path.name}; remove the files that are not part of this model, or {ADVICE}"
        )
    tensors[name] = info


def weight_files(folder: Path) -> list[Path]:
    """The files with the weights of the model in `folder`. Raises ValueError if they are unclear.

    model.safetensors; the files of its index; or all of its numbered shards.
    """
    single, index = folder / SINGLE, folder / INDEX
    if index.exists():
        files = indexed_files(index)
        if single.exists() and files != [single]:
            raise ValueError(
                f"{folder} has {SINGLE} and also {INDEX}, which names {len(files)} other files; "
                "remove the one that is not part of this model"
            )
        return files
    if single.exists():
        return [single]
    return complete_shards(folder)


def indexed_files(index: Path) -> list[Path]:
    """The files that an index names.

    Raises ValueError for names outside its folder, missing files and shards without a name in it.
    """
    weight_map = read_weight_map(index)
    names = {name if isinstance(name, str) else repr(name) for name in weight_map.values()}
    if outside := sorted(name for name in names if not re.fullmatch(FILE_NAME, name)):
        raise ValueError(
            f"{index} names {outside[0][:80]!r}, which is not a *.safetensors file of its folder; "
            f"{ADVICE}"
        )
    folder = index.parent
    if missing := sorted(name for name in names if not (folder / name).is_file()):
        raise ValueError(f"{folder} lacks {shown(missing)}, which its {INDEX} names; {ADVICE}")
    if extra := sorted({file.name for file in shards(folder)} - names):
        raise ValueError(
            f"{folder} has {shown(extra)}, which its {INDEX} does not name; remove the files of "
            f"another model, or {ADVICE}"
        )
    return sorted(folder / name for name in names)


def read_weight_map(index: Path) -> dict[str, Any]:
    """Tensor -> file name, of an index."""
    weight_map = read_object(index, ADVICE).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(f"{index} has no object weight_map; {ADVICE}")
    return weight_map


def check_index(index: Path, headers: Mapping[Path, Collection[str]]) -> None:
    """Raises ValueError if the files do not have exactly the tensors that the index says."""
    stored = {(tensor, file.name) for file, header in headers.items() for tensor in header}
    differ = sorted(
        f"{tensor} ({file})"
        for tensor, file in stored ^ set(read_weight_map(index).items())
        if is_parameter(name := language_name(tensor)) or is_kept(name)
    )
    if differ:
        raise ValueError(
            f"{index} and its files differ in {shown(differ)}: each of these is only in the index "
            f"or only in the file; {ADVICE}"
        )


def complete_shards(folder: Path) -> list[Path]:
    """All numbered shards of a folder without an index. Raises ValueError if there are none."""
    files = shards(folder)
    total = len(files)
    wanted = [folder / f"model-{i:05d}-of-{total:05d}.safetensors" for i in range(1, total + 1)]
    if files and files == wanted:
        return files
    if files:
        raise ValueError(
            f"{folder} has {shown([file.name for file in files])} and no {INDEX}: these are not "
            f"all of the shards of one model; {ADVICE}"
        )
    found = [path.name for kind in ("*.safetensors", *OTHER_FORMATS) for path in folder.glob(kind)]
    others = f" ({shown(sorted(found))} is not read)" if found else ""
    raise ValueError(
        f"{folder} has neither {SINGLE} nor {INDEX}{others}; save the model in safetensors "
        f"format (save_pretrained of a recent transformers does), rename the file of a variant to "
        f"{SINGLE}, or {ADVICE}"
    )


def shards(folder: Path) -> list[Path]:
    """The numbered weight files, with or without an index that names them."""
    return sorted(f for f in folder.glob("model-*.safetensors") if re.fullmatch(SHARD, f.name))


def shown(names: list[str], limit: int = 8) -> str:
    """The first names in one line."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def language_name(name: str) -> str:
    """A tensor's name in a text-only checkpoint."""
    for prefix, instead in PREFIXES:
        if name.startswith(prefix):
            return instead + name.removeprefix(prefix)
    return name


def is_parameter(name: str) -> bool:
    """Whether a tensor is a parameter of the language model, or of another model."""
    return not (
        name.removeprefix("model.").startswith(tuple(OTHER_PARTS)) or name.endswith(COMPUTED)
    )


def is_kept(name: str) -> bool:
    """Whether a tensor is not a parameter and is in all exports as it is."""
    parts = tuple(part for part, kept in OTHER_PARTS.items() if kept)
    return name.removeprefix("model.").startswith(parts)


def has_separate_head(folder: Path) -> bool:
    """Whether the files have an unembedding that differs from the embedding.

    Then a model is not tied, whatever its config.json says; transformers 5 does the same. Warns
    once. False for folders without readable weights, which have their own errors.
    """
    try:
        files = weight_files(folder)
        stamps = [file.stat() for file in files]
    except (OSError, ValueError):
        return False
    return _has_separate_head(folder, *((s.st_ino, s.st_size, s.st_mtime_ns) for s in stamps))


@functools.lru_cache(maxsize=64)
def _has_separate_head(folder: Path, *_: tuple[int, int, int]) -> bool:
    try:
        tensors = find_tensors(folder)
    except ValueError:
        return False
    if HEAD not in tensors or EMBEDDING not in tensors:
        return False
    head, embedding = read_tensor(tensors[HEAD]), read_tensor(tensors[EMBEDDING])
    if have_equal_rows(head, embedding):
        return False
    warnings.warn(
        f"config.json in {folder} has tie_word_embeddings=true, but its {HEAD} differs from its "
        f"{EMBEDDING}: the model is loaded and exported with two separate tables",
        stacklevel=3,
    )
    return True


def have_equal_rows(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two tables are equal; reads a part of them at a time, up to the first difference."""
    return a.shape == b.shape and all(
        np.array_equal(a[i : i + COMPARED_ROWS], b[i : i + COMPARED_ROWS], equal_nan=True)
        for i in range(0, len(a), COMPARED_ROWS)
    )
