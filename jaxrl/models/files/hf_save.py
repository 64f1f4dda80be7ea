"""Writing Hugging Face folders, one tensor at a time."""

import dataclasses
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

from jaxrl.config.choices import ONE_LABEL
from jaxrl.json_text import read_object
from jaxrl.models.config import DecoderConfig, LoRA
from jaxrl.models.decoder import Decoder, decoder_specs
from jaxrl.models.files.atomic_folder import atomic_folder, write_json
from jaxrl.models.files.export_form import ExportForm, export_form
from jaxrl.models.files.fused_experts import join_experts
from jaxrl.models.files.hf_config import (
    ADVICE,
    classifier_json,
    config_from_hf,
    config_path,
    config_to_hf,
    folder_config,
    same_model,
)
from jaxrl.models.files.quantized.scheme import without_scheme
from jaxrl.models.files.quantized.tensors import FileTensor, read_tensor
from jaxrl.models.files.safetensors import Tensor, TensorShapes, write_tensors
from jaxrl.models.files.tensor_shapes import SCORE, check_shapes, expected_shapes
from jaxrl.models.files.weight_files import find_tensors, other_tensors
from jaxrl.models.layers.router import CORRECTION
from jaxrl.models.layers.stored import QUANTIZED, dense_on_host
from jaxrl.models.spec import hf_names, is_spec
from jaxrl.models.vision.names import common_name, is_of_tower
from jaxrl.types import Tree
from sharding import hosts

SHARD_BYTES = 5_000_000_000  # largest weight file, as on the hub
TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*")
LEGACY_TEMPLATE = "chat_template.json"  # transformers prefers it to chat_template.jinja
COPIED = (*TOKENIZER_FILES, "merges.txt", "*.jinja", LEGACY_TEMPLATE, "generation_config.json")
PROCESSOR_FILES = ("*processor_config.json",)  # of images, of videos, of both with the tokenizer
ADAPTER_PARTS = ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector")
EMBEDDING_PARTS = ("lora_embedding_A", "lora_embedding_B")
START_PARTS = ("lora_A_start.weight", "lora_B_start.weight")
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
DRAFTER_ENTRIES = ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")  # of text_config


@dataclasses.dataclass(frozen=True)
class SaveSettings:
    """Changes of an export to the files of the model that was trained."""

    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # entries
    generation_config: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # entries
    chat_template: str = ""  # "": the tokenizer's
    text_only: bool = False  # of an image-and-text model, the language model alone


@dataclasses.dataclass(frozen=True)
class StoredAdapter:
    """An adapter that is not loaded: its A and B, and a trained value or reward head, by name."""

    lora: LoRA
    tensors: Mapping[str, Tensor]
    tower: Any = None  # TowerConfig, if layers of a vision tower have adapters too
    dtype: np.dtype | None = None  # of the model that it was trained with; None: that of the base
    labels: tuple[str, ...] = ONE_LABEL  # of the head

    @property
    def heads(self) -> tuple[str, ...]:
        """Heads of the model with the adapter."""
        return ("score",) if SCORE in self.tensors else ("vocab",)


def save_model(
    target: str | Path,
    params: Decoder,
    *,
    source: str | Path | None = None,
    dtype: DTypeLike | None = None,
    settings: SaveSettings | None = None,
    max_shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes the model to the folder `target`, which appears only when it is complete.

    `source` is the folder that the model was loaded from: its tokenizer files are copied, the
    tensors that are no parameters too, and its config.json and generation_config.json are kept,
    except for what `settings` change. A language model of an image-and-text `source` is written as
    a part of that model (`export_form`). `dtype` None keeps the parameters' dtypes. A model in
    `target` is replaced. In a multi-host run every process calls this and the first one writes.
    """
    source, settings = None if source is None else Path(source), settings or SaveSettings()
    with hosts.raise_together():
        form = export_form(params.cfg, source, text_only=settings.text_only)
    tensors = in_file_order(param_tensors(params, dtype), form)
    if not hosts.is_main_process():
        for tensor in tensors:
            tensor.read()
        return
    with atomic_folder(Path(target)) as folder:
        write_weights(folder, [*tensors, *copied_parts(form, tensors)], max_shard_bytes)
        write_settings(folder, params.cfg, tensors[0].dtype, source, form, settings)


def convert_model(
    source: Path,
    target: Path,
    *,
    dtype: DTypeLike | None = None,
    max_shard_bytes: int = SHARD_BYTES,
    adapter: StoredAdapter | None = None,
    settings: SaveSettings | None = None,
) -> DecoderConfig:
    """Copies the model in `source` to `target`, its language model cast to `dtype`, on no device.

    `adapter` is merged into it, as `save_model` merges the adapters of a model. Tensors that are no
    parameters are copied and not cast.
    """
    cfg, settings = folder_config(source), settings or SaveSettings()
    if adapter is not None:
        cfg = dataclasses.replace(cfg, heads=adapter.heads, labels=adapter.labels)
        cfg = dataclasses.replace(cfg, tower=adapter.tower)
    specs, found = decoder_specs(cfg), find_tensors(source)
    shapes = {name: info.shape for name, info in found.items()}
    if cfg.tower is not None:
        others = {common_name(name): info for name, info in other_tensors(source).items()}
        of_tower = filter(is_of_tower, expected_shapes(specs))
        found |= {name: others[common_name(name)] for name in of_tower}
    complaint = f"the tensors in {source} do not match its config.json"
    check_shapes(decoder_specs(folder_config(source)), shapes, complaint)
    stored = dict(adapter.tensors) if adapter is not None else {}
    base_dtype = adapter and adapter.dtype
    for name in expected_shapes(specs).keys() - stored.keys():
        cast = None if name.endswith(CORRECTION) else base_dtype
        stored[name] = stored_tensor(name, found[name], cast)
    lora = None if adapter is None else adapter.lora
    form = export_form(cfg, source, text_only=settings.text_only)
    tensors = in_file_order(merge_tensors(stored, lora, dtype), form)
    with atomic_folder(target) as folder:
        write_weights(folder, [*tensors, *copied_parts(form, tensors)], max_shard_bytes)
        write_settings(folder, cfg, tensors[0].dtype, source, form, settings)
    return cfg


def copied_parts(form: ExportForm, written: Iterable[Tensor]) -> list[Tensor]:
    """The tensors of the source that an export has unchanged, as they are not among `written`.

    They are read from the files when they are written.
    """
    trained = {tensor.name for tensor in written}
    found = {name: info for name, info in form.copied.items() if name not in trained}
    return [stored_tensor(name, found[name]) for name in sorted(found, key=natural_sort_key)]


def stored_tensor(name: str, info: FileTensor, dtype: DTypeLike | None = None) -> Tensor:
    """A tensor of a file, cast to `dtype` when it is read."""
    target = np.dtype(info.dtype if dtype is None else dtype)

    def read() -> np.ndarray:
        return np.asarray(read_tensor(info)).astype(target, copy=False)

    return Tensor(name, target, info.shape, read)


def in_file_order(tensors: Iterable[Tensor], form: ExportForm) -> list[Tensor]:
    """The tensors of a file under their names there, sorted; of some models, experts are in one.

    The language model alone has no tower.
    """
    tensors = [tensor for tensor in tensors if form.whole or not is_of_tower(tensor.name)]
    if form.joined:
        tensors = join_experts(tensors, interleaved=form.interleaved)
    named = (dataclasses.replace(tensor, name=form.file_name(tensor.name)) for tensor in tensors)
    return sorted(named, key=lambda tensor: natural_sort_key(tensor.name))


def natural_sort_key(name: str) -> tuple:
    """Sort key by layer number, with parameters outside the layers first."""
    return tuple(int(part) if part.isdigit() else -1 for part in name.split(".")), name


def param_tensors(params: Decoder, dtype: DTypeLike | None) -> Iterator[Tensor]:
    """The parameters under their Hugging Face names and shapes, stacked ones layer by layer.

    Adapters are merged into the weights that they change.
    """
    tensors = {tensor.name: tensor for tensor in stored_tensors(params)}
    return merge_tensors(tensors, params.cfg.lora, dtype)


def merge_tensors(
    tensors: Mapping[str, Tensor], lora: LoRA | None, dtype: DTypeLike | None
) -> Iterator[Tensor]:
    """The tensors of the model without adapters, which are merged into the weights they change.

    One tensor at a time in float32. `dtype` None keeps the dtypes; a router's correction keeps its
    own in any case.
    """
    if lora is not None:
        lora, tensors = joined_starts(lora, tensors)
    for name, tensor in tensors.items():
        if is_adapter(name):
            continue
        module = name.removesuffix("weight")
        parts = [tensors.get(module + part) for part in ADAPTER_PARTS]
        # The change of an embedding table is (B A)ᵀ.
        if module + EMBEDDING_PARTS[0] in tensors:
            b, a = (transposed(tensors[module + part]) for part in EMBEDDING_PARTS)
            parts = [a, b, None]
        keeps = dtype is None or name.endswith(CORRECTION)
        target_dtype = np.dtype(tensor.dtype if keeps else dtype)

        def read(tensor=tensor, parts=parts, target_dtype=target_dtype) -> np.ndarray:
            weight = tensor.read()
            a, b, magnitude = (part and part.read().astype(np.float32) for part in parts)
            if a is not None and b is not None and lora is not None:
                weight = weight.astype(np.float32) + lora.scale * (b @ a)
            if magnitude is not None:
                weight *= (magnitude / np.linalg.norm(weight, axis=1))[:, None]
            return weight.astype(target_dtype, copy=False)

        yield Tensor(name, target_dtype, tensor.shape, read)


def stored_tensors(params: Decoder) -> Iterator[Tensor]:
    """The parameters as they are, those of adapters too; quantized ones in the dtype of scales."""
    plain = decoder_specs(dataclasses.replace(params.cfg, base_dtype=""))
    return named_tensors(plain, params)


def named_tensors(specs: Tree, params: Tree) -> Iterator[Tensor]:
    """The arrays of a tree by the names of its specs, in the shapes of files."""
    leaves = jax.tree.leaves(params, is_leaf=lambda node: isinstance(node, QUANTIZED))
    for spec, leaf in zip(jax.tree.leaves(specs, is_leaf=is_spec), leaves, strict=True):
        dtype = np.dtype(leaf.scale.dtype if isinstance(leaf, QUANTIZED) else leaf.dtype)
        for index, name in zip(np.ndindex(spec.stacked_shape), hf_names(spec), strict=True):

            def read(leaf=leaf, index=index, spec=spec, dtype=dtype) -> np.ndarray:
                parts = jax.tree.map(lambda a: hosts.host_array(slice_tensor(a, index)), leaf)
                values = dense_on_host(parts) if isinstance(parts, QUANTIZED) else parts
                return spec.to_file(values.astype(dtype, copy=False))

            yield Tensor(name, dtype, spec.hf_shape, read)


def joined_starts(lora: LoRA, tensors: Mapping[str, Tensor]) -> tuple[LoRA, Mapping[str, Tensor]]:
    """The same adapters without starts: [A; A0] and [B, -B0], of twice the rank (PiSSA)."""
    if not lora.pissa:
        return lora, tensors
    joined = {name: tensor for name, tensor in tensors.items() if not name.endswith(START_PARTS)}
    for name in [name for name in joined if name.endswith(ADAPTER_PARTS[:2])]:
        one, start = tensors[name], tensors[name.removesuffix(".weight") + "_start.weight"]
        axis, sign = (0, 1) if name.endswith("lora_A.weight") else (1, -1)
        shape = tuple(n * (2 if i == axis else 1) for i, n in enumerate(one.shape))

        def read(one=one, start=start, axis=axis, sign=sign) -> np.ndarray:
            return np.concatenate([one.read(), sign * start.read()], axis=axis)

        joined[name] = Tensor(name, one.dtype, shape, read)
    alpha = lora.alpha * (2**0.5 if lora.rslora else 2)  # the scale stays
    return dataclasses.replace(lora, rank=2 * lora.rank, alpha=alpha, pissa=False), joined


def is_adapter(name: str) -> bool:
    """Whether a tensor is a part of an adapter: A, B, their starts or the magnitude."""
    return name.endswith((*ADAPTER_PARTS, *START_PARTS, *EMBEDDING_PARTS))


def transposed(tensor: Tensor) -> Tensor:
    return Tensor(tensor.name, tensor.dtype, tensor.shape[::-1], lambda: tensor.read().T)


def slice_tensor(leaf: jax.Array, index: tuple[int, ...]) -> jax.Array:
    """`leaf[index]`; only the devices that hold this slice send it."""
    if not index:
        return leaf
    return _slice_tensor(leaf, np.array(index, np.int32))


@jax.jit
def _slice_tensor(leaf: jax.Array, index: jax.Array) -> jax.Array:
    rest = jax.P(*jax.typeof(leaf).sharding.spec[index.shape[0] :])
    # Index arrays of length 1: JAX does not support scalar indices along a sharded axis.
    one = leaf.at[tuple(index[:, None])].get(out_sharding=jax.P(None, *rest))
    return one[0]


def write_settings(
    folder: Path,
    cfg: DecoderConfig,
    dtype: np.dtype,
    source: Path | None,
    form: ExportForm,
    settings: SaveSettings,
) -> None:
    """All files of a model folder except the weights; config.json is written last."""
    entries = config_json(cfg, source, whole=form.whole) | {"torch_dtype": str(dtype)}
    entries |= dict(settings.config)
    if source is not None:
        patterns = (*COPIED, *PROCESSOR_FILES) if form.whole else COPIED
        for file in (file for pattern in patterns for file in source.glob(pattern)):
            shutil.copyfile(file, folder / file.name)
    if not (folder / "generation_config.json").exists():
        ids = {key: entries[key] for key in TOKEN_IDS if entries.get(key) is not None}
        write_json(folder / "generation_config.json", ids)
    if settings.generation_config:
        path = folder / "generation_config.json"
        write_json(path, read_object(path, ADVICE) | dict(settings.generation_config))
    if settings.chat_template:
        (folder / LEGACY_TEMPLATE).unlink(missing_ok=True)
        (folder / "chat_template.jinja").write_text(settings.chat_template)
    write_json(folder / "config.json", entries)


def config_json(cfg: DecoderConfig, source: Path | None, *, whole: bool = False) -> dict[str, Any]:
    """The source's config.json if it describes exactly this model, else ours.

    `whole` keeps that of an image-and-text model too.
    """
    if source is None:
        return config_to_hf(cfg)
    if not same_model(folder_config(source), cfg):
        raise ValueError(
            f"{source} contains a different model from the one to write; pass its own folder"
        )
    source_config = without_scheme(read_object(config_path(source), ADVICE))
    parts = [source_config]
    if text := source_config.get("text_config"):
        if not whole:
            ids = {key: source_config[key] for key in TOKEN_IDS if key in source_config}
            drafter = {key: text[key] for key in DRAFTER_ENTRIES if key in text}
            return config_to_hf(cfg) | ids | drafter
        source_config["text_config"] = text = dict(text)
        parts.append(text)
    untied = config_from_hf(source_config).tied and not cfg.tied
    for part in parts:
        for key in ("dtype", "torch_dtype"):  # of the source; the first is transformers 5's name
            part.pop(key, None)
        if untied:  # as the weights say
            part["tie_word_embeddings"] = False
    return source_config | classifier_json(cfg)


def write_weights(folder: Path, tensors: Sequence[Tensor], max_shard_bytes: int) -> None:
    """model.safetensors, or numbered files of at most `max_shard_bytes` with an index."""
    read = {tensor.name: tensor.read for tensor in tensors}
    files = shard_files({t.name: (t.dtype, t.shape) for t in tensors}, max_shard_bytes)
    for file, layout in files.items():
        write_tensors(folder / file, layout, (read[name]() for name in layout))
    write_index(folder, files)


def shard_files(layout: TensorShapes, max_shard_bytes: int) -> dict[str, TensorShapes]:
    """The tensors of each weight file, in order."""
    shards: list[dict[str, tuple[np.dtype, tuple[int, ...]]]] = [{}]
    size = 0
    for name, (dtype, shape) in layout.items():
        n_bytes = int(np.prod(shape)) * dtype.itemsize
        if shards[-1] and size + n_bytes > max_shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = (dtype, shape)
        size += n_bytes
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    n = len(shards)
    return {f"model-{i:05d}-of-{n:05d}.safetensors": s for i, s in enumerate(shards, start=1)}


def write_index(folder: Path, files: Mapping[str, TensorShapes]) -> None:
    """The index of several weight files."""
    if len(files) == 1:
        return
    every = {name: entry for layout in files.values() for name, entry in layout.items()}
    total = sum(int(np.prod(shape)) * dtype.itemsize for dtype, shape in every.values())
    places = {name: file for file, layout in files.items() for name in layout}
    index = {"metadata": {"total_size": total}, "weight_map": places}
    write_json(folder / "model.safetensors.index.json", index)
