"""Adapters in PEFT's format: adapter_config.json and adapter_model.safetensors in one folder."""

import dataclasses
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from jaxrl.data.json_object import read_object
from jaxrl.models.config import DecoderConfig, LoRA
from jaxrl.models.decoder import Decoder, decoder_specs
from jaxrl.models.files.atomic_folder import atomic_folder, write_json
from jaxrl.models.files.hf_load import load_params, read_param
from jaxrl.models.files.hf_save import (
    StoredAdapter,
    Tensor,
    is_adapter,
    joined_starts,
    natural_sort_key,
    stored_tensor,
    stored_tensors,
)
from jaxrl.models.files.safetensors import TensorInfo, map_tensor, read_header, write_tensors
from jaxrl.models.lora import add_adapters
from jaxrl.models.spec import ParamSpec, hf_names, is_spec
from sharding import Rules, hosts

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # of every tensor name in PEFT's files
ADVICE = "give the folder of an adapter that PEFT or jaxrl wrote"
TASKS = {"vocab": "CAUSAL_LM", "score": "SEQ_CLS"}
# Settings of PEFT that change what an adapter computes, with the only value that is read.
UNSUPPORTED = {
    "bias": "none",
    "rank_pattern": {},
    "alpha_pattern": {},
    "layers_to_transform": None,
    "fan_in_fan_out": False,
    "lora_bias": False,
    "use_qalora": False,
    "target_parameters": None,
    "trainable_token_indices": None,
}

# Copies of base weights that PEFT puts next to the adapters of these tables.
BASE_COPIES = {
    f"{module}.base_layer.weight": f"{module}.weight"
    for module in ("model.embed_tokens", "lm_head")
}
# Starts of training of PEFT that subtract from the weights of the base model.
CHANGED_BASES = ("pissa", "olora", "corda", "loftq")


def load_with_adapters(
    folder: Path,
    rules: Rules,
    decoder: DecoderConfig,
    dtype: DTypeLike,
    *,
    seed: int,
    adapter: str = "",
) -> Decoder:
    """`load_params`, with the adapters of `decoder`: new ones, or those in the folder `adapter`."""
    base = load_params(folder, rules, decoder, dtype)
    if decoder.lora is None:
        return base
    model = add_adapters(base, decoder.lora, seed=seed, rules=rules, dtype=dtype)
    return read_adapter(Path(adapter).expanduser(), model, rules, dtype) if adapter else model


def save_adapter(folder: Path, params: Decoder, *, base: str) -> None:
    """Writes the model's adapters, and its value or reward head, to `folder`; replaces it.

    `base` names the base model. In a multi-host run every process calls this and the first writes.
    """
    lora = params.cfg.lora
    if lora is None:
        raise ValueError("the model has no adapters to save")
    kept = [t for t in stored_tensors(params) if is_adapter(t.name) or t.name.startswith("score")]
    if not hosts.is_main_process():
        for tensor in kept:
            tensor.read()
        return
    write_adapter(folder, StoredAdapter(lora, {t.name: t for t in kept}), params.cfg.heads, base)


def write_adapter(folder: Path, adapter: StoredAdapter, heads: tuple[str, ...], base: str) -> None:
    """Writes an adapter of a model with these heads to `folder`; replaces it."""
    lora, tensors = joined_starts(adapter.lora, adapter.tensors)
    with atomic_folder(folder) as target:
        in_order = sorted(tensors.values(), key=lambda t: natural_sort_key(t.name))
        write_weights(target / WEIGHTS, in_order)
        write_json(target / CONFIG, peft_config(lora, heads, base))


def open_adapter(folder: Path, decoder: DecoderConfig) -> StoredAdapter:
    """The adapter in `folder`, not loaded yet.

    Raises ValueError if it is not an adapter of this decoder.
    """
    lora, infos = adapter_config(folder), adapter_tensors(folder)
    check_tensors(decoder_specs(dataclasses.replace(decoder, lora=lora)), infos, folder)
    return StoredAdapter(lora, {name: stored_tensor(name, info) for name, info in infos.items()})


def warn_of_other_base(folder: Path, base: str) -> None:
    """Warns if the adapter in `folder` names a base model that is not part of the path `base`.

    Tensors of another model may have the same shapes.
    """
    named = read_object(folder / CONFIG, ADVICE).get("base_model_name_or_path") or ""
    if Path(named).name not in base:
        warnings.warn(
            f"the adapter in {folder} was trained on {named}, but the model is {base}: its changes "
            "are only valid for weights of that model",
            stacklevel=2,
        )


def write_weights(path: Path, tensors: list[Tensor]) -> None:
    layout = {PREFIX + tensor.name: (tensor.dtype, tensor.shape) for tensor in tensors}
    write_tensors(path, layout, (tensor.read() for tensor in tensors))


def peft_config(lora: LoRA, heads: tuple[str, ...], base: str) -> dict[str, Any]:
    """The adapter_config.json of the adapters."""
    return {
        "peft_type": "LORA",
        "task_type": TASKS["vocab" if "vocab" in heads else "score"],
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "use_rslora": lora.rslora,
        "use_dora": lora.dora,
        "target_modules": sorted(lora.targets),
        "modules_to_save": ["score"] if "score" in heads else None,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def adapter_config(folder: Path) -> LoRA:
    """The adapters that a folder holds. Raises ValueError for those that cannot be read."""
    path = folder / CONFIG
    if not path.is_file():
        raise ValueError(f"there is no {CONFIG} in {folder}; {ADVICE}")
    config = read_object(path, ADVICE)
    if config.get("peft_type") != "LORA":
        raise ValueError(
            f"{path} has peft_type={config.get('peft_type')!r}; only LORA is supported"
        )
    for name, value in UNSUPPORTED.items():
        if config.get(name, value) not in (value, None, [], {}):
            raise ValueError(
                f"{path} has {name}={config[name]!r}, which is not supported; train the adapter "
                f"with {name}={value!r}, or merge it into its base model with PEFT"
            )
    init = str(config.get("init_lora_weights", True)).lower()
    if init.startswith(CHANGED_BASES):
        raise ValueError(
            f"{path} has init_lora_weights={config['init_lora_weights']!r}: PEFT has subtracted "
            "the start of this adapter from its base model; save it again with PEFT's "
            "path_initial_model_for_weight_conversion, for the unchanged base model"
        )
    found = [config.get(name) for name in ("r", "lora_alpha", "target_modules")]
    match found:
        case [int(rank), int() | float() as alpha, [_, *_] as targets] if rank > 0:
            names = sorted({str(name).rpartition(".")[2] for name in targets})
            rslora, dora = (bool(config.get(name)) for name in ("use_rslora", "use_dora"))
            return LoRA(rank, float(alpha), rslora, dora, tuple(names))
    raise ValueError(
        f"{path} has r, lora_alpha and target_modules {found}; expected two numbers and a list of "
        f"names; {ADVICE}"
    )


def read_adapter(folder: Path, model: Decoder, rules: Rules, dtype: DTypeLike) -> Decoder:
    """The model with the adapters in `folder` in place of the present ones; the base is shared.

    Raises the errors of `check_adapter`.
    """
    check_adapter(folder, model.cfg)
    tensors, specs = adapter_tensors(folder), decoder_specs(model.cfg)
    mesh = jax.sharding.get_mesh()

    def leaf(spec: ParamSpec, old: jax.Array) -> jax.Array:
        names = hf_names(spec)
        if names[0] not in tensors:
            return old
        sharding = NamedSharding(mesh, rules.spec(*spec.axes))
        return read_param(spec, [tensors[name] for name in names], sharding, dtype)

    return jax.tree.map(leaf, specs, model, is_leaf=is_spec)


def check_adapter(folder: Path, decoder: DecoderConfig) -> None:
    """Raises ValueError unless the adapter in `folder` is one of the decoder, with its adapters.

    Rank, scale and layers must be those of the decoder's adapters, and the tensors must fit.
    """
    found, lora = adapter_config(folder), decoder.lora
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
    check_tensors(decoder_specs(decoder), adapter_tensors(folder), folder)


def adapter_tensors(folder: Path) -> dict[str, TensorInfo]:
    """The tensors of an adapter, by the names that their layers have in the base model.

    Without copies of base weights.
    """
    return {name: i for name, i in _all_tensors(folder).items() if name not in BASE_COPIES}


def check_base_copies(folder: Path, base: Mapping[str, TensorInfo]) -> None:
    """Raises ValueError if the adapter in `folder` has a copy of another base model's weights."""
    for name, info in _all_tensors(folder).items():
        if name not in BASE_COPIES:
            continue
        copy, own = np.asarray(map_tensor(info)), np.asarray(map_tensor(base[BASE_COPIES[name]]))
        if copy.shape != own.shape or not np.array_equal(own.astype(copy.dtype), copy):
            raise ValueError(
                f"the adapter in {folder} has a {name} [{', '.join(map(str, copy.shape))}] that is "
                f"not the base model's {BASE_COPIES[name]}: its table was trained or resized; "
                "merge it into its base model with PEFT"
            )


def _all_tensors(folder: Path) -> dict[str, TensorInfo]:
    if not (folder / WEIGHTS).is_file():
        raise ValueError(f"there is no {WEIGHTS} in {folder}; {ADVICE}")
    header = read_header(folder / WEIGHTS)
    return {name.removeprefix(PREFIX): info for name, info in header.items()}


def check_tensors(specs: Decoder, tensors: dict[str, TensorInfo], folder: Path) -> None:
    """Raises ValueError, listing the names, unless the tensors are those of the adapters."""
    leaves = jax.tree.leaves(specs, is_leaf=is_spec)
    shapes = {name: spec.hf_shape for spec in leaves for name in hf_names(spec)}
    wanted = {name for name in shapes if is_adapter(name)}
    wrong = sorted(wanted ^ (tensors.keys() - {"score.weight"}))
    wrong += [name for name in wanted & tensors.keys() if tensors[name].shape != shapes[name]]
    if wrong:
        raise ValueError(
            f"the adapter in {folder} is of another model: {len(wrong)} tensors are missing, "
            f"unknown or of another shape: {', '.join(wrong[:8])}; use it with its "
            "base model"
        )
