"""Exports a checkpoint of a run as a Hugging Face folder, on one host and without its devices."""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

from jaxrl.checkpoint.checkpointer import find_step
from jaxrl.checkpoint.errors import CheckpointError
from jaxrl.checkpoint.saved_arrays import SavedArrays
from jaxrl.config.choices import ONE_LABEL
from jaxrl.config.keys import RunConfig
from jaxrl.config.saved import read_run_config
from jaxrl.data.chat.encoding import ChatRenderer
from jaxrl.data.tokenizer import padding_id, stop_ids
from jaxrl.models.config import DecoderConfig
from jaxrl.models.decoder import decoder_specs
from jaxrl.models.files.adapter import write_adapter
from jaxrl.models.files.hf_config import folder_config
from jaxrl.models.files.hf_save import (
    SHARD_BYTES,
    SaveSettings,
    StoredAdapter,
    Tensor,
    convert_model,
)
from jaxrl.models.files.hf_stream import specs_by_path, stream_model
from jaxrl.models.files.kept_record import warn_of_change
from jaxrl.models.files.source import resolve_model
from jaxrl.models.lora import checkpoint_part, with_adapters
from jaxrl.models.spec import ParamSpec, hf_names, is_spec
from jaxrl.models.vision.towers import known_tower, with_trained_tower
from jaxrl.trainer.setup.models import make_renderer

# policy: the model that the run trains, also a reward model; adapter: its adapter, in PEFT's format
MAX_SHOWN = 4  # differences in one error message


@dataclasses.dataclass(frozen=True)
class _Source:
    """The source of an exported part."""

    prefix: str  # of its arrays in the checkpoint
    heads: tuple[str, ...]  # of the export
    folder: Path  # model that the part was loaded from


def export_checkpoint(
    run: Path,
    step: str,
    target: Path,
    *,
    part: str = "policy",
    dtype: DTypeLike | None = None,
    max_shard_bytes: int = SHARD_BYTES,
    text_only: bool = False,
) -> tuple[int, DecoderConfig]:
    """Writes a part of a checkpoint of the run folder `run`; returns the step and the model.

    `step` is a number, "last", or "best" by config.checkpoint.best_metric. The folder equals the
    export that the run writes at its end: the same names, dtypes, chat template, generation config
    and special tokens. `dtype` casts the weights. `text_only` leaves out the other parts of an
    image-and-text model, as the names of an adapter do then. Host memory holds one chunk of the
    checkpoint.
    Raises ValueError if there is no such step or part, CheckpointError if it cannot be read.
    """
    cfg = read_run_config(run)
    if cfg is None:
        raise ValueError(
            f"{run} is not a run folder with a config.json and checkpoints; --step exports a "
            "checkpoint of a run"
        )
    if part == "adapter" and not cfg.lora.rank:
        raise ValueError(
            f"--part=adapter: {run} trains all weights (lora.rank=0); set --part=policy"
        )
    directory = run / "checkpoints"
    number = find_step(directory, step, cfg.checkpoint)
    policy = resolve_model(cfg.model.path, key=f"model.path in {run / 'config.json'}")
    arrays = SavedArrays(directory, number)
    source = _source(cfg, policy, part, arrays.shapes)
    stacked = not any(name.startswith(f"{source.prefix}layers/0/") for name in arrays.shapes)
    labels = cfg.reward_model.labels if part != "critic" else ONE_LABEL
    decoder = dataclasses.replace(
        folder_config(source.folder), heads=source.heads, labels=labels, stacked=stacked
    )
    if not source.prefix.startswith("critic/"):
        freeze = cfg.model.freeze_vision
        tower = None if freeze == "all" else known_tower(source.folder)
        decoder = with_trained_tower(decoder, tower, freeze)
    decoder = with_adapters(cfg.lora, decoder)
    dtypes = _dtypes(decoder, source.prefix, arrays)
    stored = None
    if decoder.lora is not None:
        stored = _stored_adapter(decoder, dtypes, source.prefix, arrays)
    if part == "adapter" and stored is not None:
        base = None if text_only else source.folder
        write_adapter(target, stored, decoder, cfg.model.path, base)
        return number, decoder
    renderer = make_renderer(cfg, policy, folder_config(policy))
    is_language_model = "vocab" in source.heads
    settings_of = language_model_settings if is_language_model else classifier_settings
    settings = dataclasses.replace(settings_of(cfg, renderer, source.folder), text_only=text_only)
    if is_language_model:
        warn_of_change(run, source.folder)
    if stored is not None:
        merged = convert_model(
            source.folder,
            target,
            dtype=dtype,
            max_shard_bytes=max_shard_bytes,
            adapter=stored,
            settings=settings,
        )
        return number, merged
    if dtype is not None:
        dtypes = dict.fromkeys(dtypes, np.dtype(dtype))
    stream_model(
        target,
        decoder,
        dtypes,
        lambda path: arrays.parts(source.prefix + path),
        source=source.folder,
        settings=settings,
        max_shard_bytes=max_shard_bytes,
    )
    return number, decoder


def _stored_adapter(
    decoder: DecoderConfig,
    dtypes: Mapping[str, np.dtype],
    prefix: str,
    arrays: SavedArrays,
) -> StoredAdapter:
    """The adapters in a checkpoint, and the head of a part that is a classifier."""
    tensors: dict[str, Tensor] = {}
    for path, spec in specs_by_path(decoder).items():
        if path not in dtypes:
            continue
        saved = _name(prefix, path)
        read_all = functools.cache(functools.partial(arrays.read, [saved]))
        for index, name in zip(np.ndindex(spec.stacked_shape), hf_names(spec), strict=True):

            def read(read_all=read_all, index=index, spec=spec, dtype=dtypes[path], saved=saved):
                return spec.to_file(read_all()[saved][index]).astype(dtype, copy=False)

            tensors[name] = Tensor(name, dtypes[path], spec.hf_shape, read)
    assert decoder.lora is not None
    dtype = next(iter(dtypes.values()))
    return StoredAdapter(decoder.lora, tensors, decoder.tower, dtype, decoder.labels)


def language_model_settings(cfg: RunConfig, renderer: ChatRenderer, source: Path) -> SaveSettings:
    """The stop tokens and the chat template of the run."""
    stop = {*stop_ids(source, renderer.tokenizer), *cfg.rollout.sampling.stop_token_ids}
    return SaveSettings(
        generation_config={"eos_token_id": sorted(stop) if len(stop) > 1 else min(stop)},
        chat_template=_chat_template(cfg, renderer),
    )


def classifier_settings(cfg: RunConfig, renderer: ChatRenderer, source: Path) -> SaveSettings:
    """A padding token, by which transformers finds the last token of a row; the chat template."""
    ids = {"pad_token_id": padding_id(source, renderer.tokenizer)}
    return SaveSettings(config=ids, chat_template=_chat_template(cfg, renderer))


def _chat_template(cfg: RunConfig, renderer: ChatRenderer) -> str:
    """The run's chat template; "" if it is the model's."""
    return renderer.template if cfg.data.chat_template else ""


def _source(cfg: RunConfig, policy: Path, part: str, saved: Mapping[str, Any]) -> _Source:
    """Where a part is in the checkpoint. Raises ValueError if the run does not have it."""
    if part == "critic":
        if any(name.startswith("critic/params/") for name in saved):
            path = cfg.critic.path
            folder = resolve_model(path, key="config.critic.path") if path else policy
            return _Source("critic/params/", ("score",), folder)
        if cfg.critic.shared and "params/score" in saved:
            return _Source("params/", ("score",), policy)
        raise ValueError("--part=critic: the run has no critic; set --part=policy")
    heads = _policy_heads(cfg, folder_config(policy), saved)
    if part == "ema":
        if not any(name.startswith("opt_state/ema/") for name in saved):
            raise ValueError(
                "--part=ema: the run has no average (learner.ema=0); set --part=policy"
            )
        return _Source("opt_state/ema/", heads, policy)
    return _Source("params/", heads, policy)


def _policy_heads(
    cfg: RunConfig, decoder: DecoderConfig, saved: Mapping[str, Any]
) -> tuple[str, ...]:
    """The head of the export: logits, unless the run trains a reward model."""
    frozen = decoder.tied or cfg.lora.rank  # no head of logits in a checkpoint
    has_logits = cfg.critic.shared if frozen else "params/lm_head" in saved
    return ("vocab",) if has_logits or "params/score" not in saved else ("score",)


def _dtypes(decoder: DecoderConfig, prefix: str, arrays: SavedArrays) -> dict[str, np.dtype]:
    """The policy's dtype of every trained parameter. Raises CheckpointError for another model."""
    both = _saved_specs(dataclasses.replace(decoder, heads=("vocab", "score")))
    specs, saved = _saved_specs(decoder), arrays.shapes
    there = {n.removeprefix(prefix): leaf for n, leaf in saved.items() if n.startswith(prefix)}
    names = {path: _name(prefix, path) for path in specs}
    there |= {path: saved[name] for path, name in names.items() if name in saved}
    errors = [f"{path} is not in it" for path in specs if path not in there]
    errors += [f"{path} is in it but not in the model" for path in there if path not in both]
    errors += [
        f"{path} is {list(there[path].shape)} in it and {list(spec.shape)} in the model"
        for path, spec in specs.items()
        if path in there and tuple(there[path].shape) != spec.shape
    ]
    if errors:
        raise CheckpointError(
            f"the checkpoint {arrays.folder} is from another model: "
            f"{'; '.join(errors[:MAX_SHOWN])}; restore the folder that config.json names"
        )
    params = _params_prefix(prefix)
    return {path: np.dtype(saved[params + path].dtype) for path in specs}


def _name(prefix: str, path: str) -> str:
    """Name in a checkpoint of an array of the part `prefix`; starts of adapters have no average."""
    is_start = "/lora/" in path and path.endswith(("/a0", "/b0"))
    return (_params_prefix(prefix) if is_start else prefix) + path


def _params_prefix(prefix: str) -> str:
    """Prefix of the parameters of a part."""
    return "critic/params/" if prefix.startswith("critic/") else "params/"


def _saved_specs(decoder: DecoderConfig) -> dict[str, ParamSpec]:
    """The parameters that a checkpoint of this model has, by key path."""
    specs = specs_by_path(decoder)
    kept = jax.tree.leaves(checkpoint_part(decoder_specs(decoder)), is_leaf=is_spec)
    names = {spec.hf for spec in kept}
    return {path: spec for path, spec in specs.items() if spec.hf in names}
