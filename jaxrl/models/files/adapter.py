"""Adapters in PEFT's format: adapter_config.json and adapter_model.safetensors in one folder.

PEFT names a layer by its place in the class of transformers: "model.layers.0.self_attn.q_proj" in a
language model, "model.language_model.layers.0.self_attn.q_proj" in an image-and-text model. Both
are read.
"""

import dataclasses
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from jaxrl.json_text import read_object
from jaxrl.models.config import DecoderConfig, LoRA
from jaxrl.models.decoder import Decoder, decoder_specs
from jaxrl.models.files.atomic_folder import atomic_folder, write_json
from jaxrl.models.files.export_form import is_image_and_text, whole_name
from jaxrl.models.files.hf_load import read_param
from jaxrl.models.files.hf_save import (
    StoredAdapter,
    is_adapter,
    joined_starts,
    natural_sort_key,
    stored_tensor,
    stored_tensors,
)
from jaxrl.models.files.peft_config import REMEDY, peft_config, read_peft_config
from jaxrl.models.files.quantized.tensors import FileTensor, read_tensor
from jaxrl.models.files.safetensors import (
    FLOATS,
    Tensor,
    TensorInfo,
    map_tensor,
    read_header,
    write_tensors,
)
from jaxrl.models.files.tensor_shapes import SCORE
from jaxrl.models.files.weight_files import add_once, is_parameter, language_name, shown
from jaxrl.models.lora import add_adapters
from jaxrl.models.spec import ParamSpec, hf_names, is_spec
from jaxrl.models.vision.files import load_whole
from jaxrl.models.vision.names import common_name, is_of_tower
from jaxrl.models.vision.tower import tower_specs
from jaxrl.models.vision.towers import folder_tower, with_trained_tower
from sharding import Rules, hosts

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # of every tensor name in PEFT's files
ADVICE = "give the folder of an adapter that PEFT or jaxrl wrote"
EXCLUDED = ".*(visual|vision|multi_modal_projector|audio).*"  # the other parts, for PEFT
# Copies of base weights that PEFT puts next to the adapters of these tables.
BASE_COPIES = {
    f"{module}.base_layer.weight": f"{module}.weight"
    for module in ("model.embed_tokens", "lm_head")
}


def load_with_adapters(
    folder: Path,
    rules: Rules,
    decoder: DecoderConfig,
    dtype: DTypeLike,
    *,
    seed: int,
    adapter: str = "",
) -> Decoder:
    """`load_whole`, with the adapters of `decoder`: new ones, or those in the folder `adapter`."""
    base = load_whole(folder, rules, decoder, dtype)
    if decoder.lora is None:
        return base
    model = add_adapters(base, decoder.lora, seed=seed, rules=rules, dtype=dtype)
    return read_adapter(Path(adapter).expanduser(), model, rules, dtype) if adapter else model


def save_adapter(folder: Path, params: Decoder, *, base: str, source: Path | None = None) -> None:
    """Writes the model's adapters, and its value or reward head, to `folder`; replaces it.

    `base` names the base model and `source` is its folder (`write_adapter`). In a multi-host run
    every process calls this and the first writes.
    """
    lora = params.cfg.lora
    if lora is None:
        raise ValueError("the model has no adapters to save")
    kept = [t for t in stored_tensors(params) if is_adapter(t.name) or t.name.startswith("score")]
    if not hosts.is_main_process():
        for tensor in kept:
            tensor.read()
        return
    write_adapter(folder, StoredAdapter(lora, {t.name: t for t in kept}), params.cfg, base, source)


def write_adapter(
    folder: Path,
    adapter: StoredAdapter,
    decoder: DecoderConfig,
    base: str,
    source: Path | None = None,
) -> None:
    """Writes an adapter of a model to `folder`; replaces it. Warns if PEFT would not read all.

    If the base model in the folder `source` is an image-and-text model, the adapter is one of that
    class; of a classifier and without a `source` it is one of the language model.
    """
    lora, tensors = joined_starts(adapter.lora, adapter.tensors)
    warn_of_shared_experts(folder, tensors, decoder)
    whole = source is not None and "vocab" in decoder.heads and is_image_and_text(source)
    in_order = sorted(tensors.values(), key=lambda t: natural_sort_key(t.name))
    if whole:
        in_order = [dataclasses.replace(t, name=whole_name(t.name)) for t in in_order]
    with atomic_folder(folder) as target:
        write_weights(target / WEIGHTS, in_order)
        write_json(target / CONFIG, peft_config(lora, decoder.heads, base, whole=whole))


def warn_of_shared_experts(folder: Path, names: Collection[str], decoder: DecoderConfig) -> None:
    """Warns of the adapters of a model whose shared expert PEFT takes for other experts."""
    parts = (".shared_expert.", ".shared_experts.")
    n = sum(any(part in name for part in parts) for name in names)
    if n and decoder.family in ("qwen3_next", "glm4_moe", "glm4_moe_lite", "deepseek_v3"):
        warnings.warn(
            f"PEFT 0.21 does not read {n} tensors of the adapter in {folder}, those of the shared "
            "expert: it takes their names for names of other experts. jaxrl reads them. For other "
            "programs use the merged model (hf/ of the run, or python -m jaxrl.convert MODEL DIR "
            f"--adapter={folder}), or train with config.lora.exclude_modules=('shared_expert.*',)",
            stacklevel=2,
        )


def open_adapter(folder: Path, decoder: DecoderConfig) -> StoredAdapter:
    """The adapter in `folder`, not loaded yet.

    Raises ValueError if it is not an adapter of this decoder.
    """
    lora, infos = adapter_config(folder, decoder), adapter_tensors(folder, decoder)
    check_tensors(decoder_specs(dataclasses.replace(decoder, lora=lora)), infos, folder)
    tensors = {name: stored_tensor(name, info) for name, info in infos.items()}
    n_labels = infos[SCORE].shape[0] if SCORE in infos else 1
    labels = tuple(f"LABEL_{i}" for i in range(n_labels))
    return StoredAdapter(lora, tensors, decoder.tower, labels=labels)


def with_adapted_tower(folder: Path, decoder: DecoderConfig, source: Path) -> DecoderConfig:
    """The decoder of the model in `source`, with its tower if the adapter changes that."""
    if any(map(is_of_tower, _all_tensors(folder))):
        return with_trained_tower(decoder, folder_tower(source), "none")
    return decoder


def warn_of_other_base(folder: Path, base: str) -> None:
    """Warns if the adapter in `folder` names a base model or a revision that `base` does not.

    `base` is a path. Tensors of another model may have the same shapes.
    """
    config = read_object(folder / CONFIG, ADVICE)
    named, revision = (config.get(key) or "" for key in ("base_model_name_or_path", "revision"))
    if Path(str(named)).name not in base:
        warnings.warn(
            f"the adapter in {folder} was trained on {named}, but the model is {base}: its changes "
            "are only valid for weights of that model",
            stacklevel=2,
        )
    if revision not in ("", "main") and str(revision) not in base:
        warnings.warn(
            f"the adapter in {folder} was trained on the revision {revision!r} of {named}: check "
            f"that {base} is that revision",
            stacklevel=2,
        )


def write_weights(path: Path, tensors: list[Tensor]) -> None:
    layout = {PREFIX + tensor.name: (tensor.dtype, tensor.shape) for tensor in tensors}
    write_tensors(path, layout, (tensor.read() for tensor in tensors))


def adapter_config(folder: Path, decoder: DecoderConfig | None = None) -> LoRA:
    """The adapters that a folder holds. Raises ValueError for those that cannot be read.

    Layers of a vision tower may have some if the tower is a part of the `decoder`.
    """
    path = folder / CONFIG
    if not path.is_file():
        raise ValueError(f"there is no {CONFIG} in {folder}; {ADVICE}")
    config = read_object(path, ADVICE)
    names = filter(is_adapter, adapter_tensors(folder, decoder))
    modules = {name.partition(".lora_")[0] for name in names}
    try:
        return read_peft_config(config, modules)
    except ValueError as error:
        raise ValueError(f"{path} has {error}") from error


def read_adapter(folder: Path, model: Decoder, rules: Rules, dtype: DTypeLike) -> Decoder:
    """The model with the adapters in `folder` in place of the present ones; the base is shared.

    Raises the errors of `check_adapter`.
    """
    check_adapter(folder, model.cfg)
    tensors, specs = adapter_tensors(folder, model.cfg), decoder_specs(model.cfg)
    warn_of_unused_head(folder, tensors, model.cfg)
    mesh = jax.sharding.get_mesh()

    def leaf(spec: ParamSpec, old: jax.Array) -> jax.Array:
        names = hf_names(spec)
        if names[0] not in tensors:
            return old
        sharding = NamedSharding(mesh, rules.spec(*spec.axes))
        return read_param(spec, [tensors[name] for name in names], sharding, dtype)

    return jax.tree.map(leaf, specs, model, is_leaf=is_spec)


def warn_of_unused_head(folder: Path, tensors: Collection[str], decoder: DecoderConfig) -> None:
    """Warns if the adapter in `folder` has a score head that the model does not have."""
    if SCORE in tensors and "score" not in decoder.heads:
        warnings.warn(
            f"the adapter in {folder} has a score head ({SCORE}), which is not loaded: this model "
            "computes logits only",
            stacklevel=2,
        )


def check_adapter(folder: Path, decoder: DecoderConfig) -> None:
    """Raises ValueError unless the adapter in `folder` is one of the decoder, with its adapters.

    Rank, scale and layers must be those of the decoder's adapters, and the tensors must fit.
    """
    found, lora = adapter_config(folder, decoder), decoder.lora
    assert lora is not None
    wanted = dataclasses.replace(lora, targets=tuple(sorted(lora.targets)))
    if found != wanted:
        keys = ("rank", "alpha", "rslora", "dora", "targets")
        differ = [k for k in keys if getattr(found, k) != getattr(wanted, k)]
        lines = [f"{k} {getattr(found, k)!r}, not {getattr(wanted, k)!r}" for k in differ]
        raise ValueError(
            f"the adapter in {folder} has {', '.join(lines)}; set config.lora.rank, .alpha, "
            ".rslora, .dora and .target_modules to those of the adapter"
        )
    check_tensors(decoder_specs(decoder), adapter_tensors(folder, decoder), folder)


def adapter_tensors(folder: Path, decoder: DecoderConfig | None = None) -> dict[str, TensorInfo]:
    """The tensors of an adapter, by the names that their layers have in the base model.

    Without copies of base weights. Raises ValueError for tensors of parts that are frozen: of a
    vision tower unless it is a part of the `decoder`.
    """
    own, found, others = _tower_modules(decoder), {}, []
    for name, info in _all_tensors(folder).items():
        if is_of_tower(name) and own:
            module, part, rest = name.partition(".lora_")
            found[f"{own.get(common_name(module), module)}{part}{rest}"] = info
        elif not is_parameter(name):
            others.append(name)
        elif name not in BASE_COPIES:
            found[name] = info
    if others:
        raise ValueError(
            f"the adapter in {folder} changes layers outside of the language model, which are "
            f"frozen here ({len(others)} tensors: {shown(sorted(others), 2)}); train all of them "
            "with config.model.freeze_vision='none' and data.images=True, train it with the layers "
            f"of the language model only (in PEFT: exclude_modules={EXCLUDED!r}), or {REMEDY}"
        )
    return found


def _tower_modules(decoder: DecoderConfig | None) -> dict[str, str]:
    """The names of the layers of the decoder's tower, by their common names."""
    if decoder is None or decoder.tower is None:
        return {}
    specs = jax.tree.leaves(tower_specs(dataclasses.replace(decoder.tower, lora=None)))
    modules = [name.removesuffix(".weight") for spec in specs for name in hf_names(spec)]
    return {common_name(name): name for name in modules}


def check_base_copies(folder: Path, base: Mapping[str, FileTensor]) -> None:
    """Raises ValueError if the adapter in `folder` has a copy of another base model's weights."""
    for name, info in _all_tensors(folder).items():
        if name not in BASE_COPIES:
            continue
        copy, own = np.asarray(map_tensor(info)), np.asarray(read_tensor(base[BASE_COPIES[name]]))
        if copy.shape != own.shape or not np.array_equal(own.astype(copy.dtype), copy):
            raise ValueError(
                f"the adapter in {folder} has a {name} [{', '.join(map(str, copy.shape))}] that is "
                f"not the base model's {BASE_COPIES[name]}: its table was trained or resized; "
                "merge it into its base model with PEFT"
            )


def _all_tensors(folder: Path) -> dict[str, TensorInfo]:
    if not (folder / WEIGHTS).is_file():
        raise ValueError(f"there is no {WEIGHTS} in {folder}; {ADVICE}")
    tensors: dict[str, TensorInfo] = {}
    for stored, info in read_header(folder / WEIGHTS).items():
        add_once(tensors, language_name(stored.removeprefix(PREFIX)), info)
    return tensors


def check_tensors(specs: Decoder, tensors: dict[str, TensorInfo], folder: Path) -> None:
    """Raises ValueError, listing the names, unless the tensors are those of the adapters.

    A trained score head may be there too.
    """
    leaves = jax.tree.leaves(specs, is_leaf=is_spec)
    shapes = {name: spec.hf_shape for spec in leaves for name in hf_names(spec)}
    wanted = {name: shape for name, shape in shapes.items() if is_adapter(name)}
    n_labels = tensors[SCORE].shape[0] if SCORE in tensors else 1
    allowed = wanted | {SCORE: (n_labels, specs.cfg.D)}
    known = sorted(tensors.keys() & allowed.keys())
    errors = {
        "missing": sorted(wanted.keys() - tensors.keys()),
        "unknown": sorted(tensors.keys() - allowed.keys()),
        "of another shape": [name for name in known if tensors[name].shape != allowed[name]],
        "not floating-point numbers": [name for name in known if tensors[name].dtype not in FLOATS],
    }
    lines = [
        f"{len(names)} tensors are {kind}: {shown(names)}"
        for kind, names in errors.items()
        if names
    ]
    if lines:
        raise ValueError(
            f"the adapter in {folder} is of another model, or changes only some of its layers: "
            f"{'; '.join(lines)}; use it with its base model, or {REMEDY}"
        )
