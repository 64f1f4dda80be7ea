"""Adapters as clients choose them, and the folders in which their weights and states are."""

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxrl.api.room import Arrays
from jaxrl.api.training import TrainedAdapter, Trainer, start_moments
from jaxrl.http.errors import RequestError
from jaxrl.json_text import read_object
from jaxrl.models.config import DecoderConfig, LoRA
from jaxrl.models.files.adapter import (
    adapter_config,
    read_adapter,
    save_adapter,
    with_adapted_tower,
)
from jaxrl.models.files.atomic_folder import atomic_folder, write_json
from jaxrl.models.files.hf_load import load_params
from jaxrl.models.files.hf_save import save_model
from jaxrl.models.layers.mlp import SHARED_GATE
from jaxrl.models.lora import adapter_name, linear_layers, tower_layers

log = logging.getLogger(__name__)

# Of all adapters, so that the learning rate need not change with the rank:
# https://thinkingmachines.ai/blog/lora (the package tinker has no field for it).
ALPHA = 32.0
UNEMBEDDING = "lm_head"
PARTS = {  # the layers that each switch of a client's lora_config trains, by prefix
    "train_attn": ("self_attn.", "linear_attn.", "conv."),
    "train_mlp": ("mlp.", "feed_forward.", "block_sparse_moe.", "experts."),
    "train_unembed": (UNEMBEDDING,),
}
WEIGHTS, FIRST, SECOND = "adapter", "exp_avg", "exp_avg_sq"  # folders of a saved state
STATE = "config.json"


@dataclasses.dataclass(frozen=True)
class AdapterChoice:
    """The adapter that a client asks for."""

    rank: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True

    def possible(self, decoder: DecoderConfig) -> "AdapterChoice":
        """The choice without an unembedding that has no separate adapter, as the log then says.

        The package tinker asks for one by default.
        """
        if not (self.train_unembed and decoder.tied):
            return self
        log.info("the unembedding is tied to the embedding table: train_unembed trains no adapter")
        return dataclasses.replace(self, train_unembed=False)

    def lora(self, decoder: DecoderConfig, max_rank: int) -> LoRA:
        """Raises RequestError (400) for what the model or the server cannot have."""
        if not 0 < self.rank <= max_rank:
            raise RequestError(
                400,
                f"the LoRA rank {self.rank} is not within 1 to {max_rank}, the server's --max-rank",
                param="lora_config",
            )
        return LoRA(self.rank, ALPHA, targets=targets(decoder, dataclasses.asdict(self)))


def targets(decoder: DecoderConfig, switches: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the layers that the switches choose, but for a tied unembedding.

    In a vision tower that is trained, its attention, and its MLPs with those of the projector.
    Raises RequestError (400) if there is none.
    """
    prefixes = tuple(p for switch, of in PARTS.items() if switches[switch] for p in of)
    names = [n for n in linear_layers(decoder) if n.startswith(prefixes) and prefixes]
    for name in tower_layers(decoder):
        switch = "train_attn" if "attn." in name else "train_mlp"
        names += [name] if switches[switch] else []
    names = [n for n in names if not n.endswith(SHARED_GATE)]
    names = [n for n in names if n != UNEMBEDDING or not decoder.tied]
    if not names:
        raise RequestError(400, "lora_config trains no layer of this model", param="lora_config")
    return tuple(dict.fromkeys(map(adapter_name, names)))


def room_for(decoder: DecoderConfig, rank: int, n_stacked: int = 0) -> LoRA:
    """Room for an adapter of at most this rank, or for several in one engine; the scale is 1."""
    switches = dict.fromkeys(PARTS, True)
    return LoRA(rank, float(rank), targets=targets(decoder, switches), n_stacked=n_stacked)


@dataclasses.dataclass(frozen=True)
class AdapterFiles:
    """Writes and reads the folders of adapters of one base model; call on the device's thread."""

    trainer: Trainer
    base: str  # the name of the base model
    source: Path  # its folder

    def save_weights(self, folder: Path, adapter: TrainedAdapter) -> None:
        """Writes an adapter in PEFT's format, or a model in Hugging Face's; replaces the folder."""
        self._save(folder, adapter, adapter.weights)

    def save_state(self, folder: Path, adapter: TrainedAdapter) -> None:
        """Writes weights and moments, each as `save_weights`; the folder appears complete.

        A gradient since the last step is not part of it.
        """
        with atomic_folder(folder) as target:
            self._save(target / WEIGHTS, adapter, adapter.weights)
            self._save(target / FIRST, adapter, adapter.moments.mu)
            self._save(target / SECOND, adapter, adapter.moments.nu)
            write_json(target / STATE, {"n_steps": adapter.n_steps})

    def load(self, folder: Path, *, optimizer: bool) -> TrainedAdapter:
        """The adapter of a saved state, with new moments unless `optimizer` is set."""
        decoder = self.trainer.base.cfg
        self._check_tower(folder / WEIGHTS)
        lora = None if self.trainer.trains_all else adapter_config(folder / WEIGHTS, decoder)
        weights = self._read(folder / WEIGHTS, lora)
        moments = start_moments(weights)
        if optimizer:
            n_steps = read_object(folder / STATE, "choose another checkpoint")["n_steps"]
            moments = moments._replace(
                count=jnp.asarray(np.int32(n_steps)),
                mu=self._read(folder / FIRST, lora),
                nu=self._read(folder / SECOND, lora),
            )
        return TrainedAdapter(lora, weights, moments)

    def _check_tower(self, folder: Path) -> None:
        """Raises RequestError (400) for adapters of a tower that is frozen here."""
        decoder = self.trainer.base.cfg
        if self.trainer.trains_all or decoder.tower is not None:
            return
        if with_adapted_tower(folder, decoder, self.source).tower is not None:
            raise RequestError(
                400,
                "this checkpoint has adapters of the vision tower, which is frozen here; start the "
                "server with --train-vision and --config.data.images=True",
                param="path",
            )

    def _save(self, folder: Path, adapter: TrainedAdapter, arrays: Arrays) -> None:
        model = self.trainer.room.cut(arrays, self.trainer.single(adapter.lora))
        if adapter.lora is None:
            save_model(folder, model, source=self.source, dtype=jnp.float32)
        else:
            save_adapter(folder, model, base=self.base, source=self.source)

    def _read(self, folder: Path, lora: LoRA | None) -> Arrays:
        room, single = self.trainer.room, self.trainer.single(lora)
        if lora is None:
            return room.pad(load_params(folder, room.rules, single.cfg, jnp.float32))
        return room.pad(read_adapter(folder, single, room.rules, jnp.float32))
