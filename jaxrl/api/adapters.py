"""Adapters as clients choose them, and the folders in which their weights and states are."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxrl.api.training import TrainedAdapter, Trainer, start_moments
from jaxrl.http.errors import RequestError
from jaxrl.json_text import read_object
from jaxrl.models.config import DecoderConfig, LoRA
from jaxrl.models.files.adapter import adapter_config, read_adapter, save_adapter
from jaxrl.models.files.atomic_folder import atomic_folder, write_json
from jaxrl.models.layers.mlp import SHARED_GATE
from jaxrl.models.lora import adapter_name, linear_layers, split
from jaxrl.types import Tree

ALPHA = 32.0  # of all adapters, as Tinker's: the learning rate need not change with the rank
PARTS = {  # the layers that each switch of a client's lora_config trains, by prefix
    "train_attn": ("self_attn.", "linear_attn.", "conv."),
    "train_mlp": ("mlp.", "feed_forward.", "block_sparse_moe.", "experts."),
    "train_unembed": ("lm_head",),
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
    """The names of the layers that the switches choose.

    Raises RequestError (400) if there is none, or for the unembedding of a tied model.
    """
    prefixes = tuple(p for switch, of in PARTS.items() if switches[switch] for p in of)
    names = [n for n in linear_layers(decoder) if n.startswith(prefixes) and prefixes]
    names = [name for name in names if not name.endswith(SHARED_GATE)]
    if decoder.tied and "lm_head" in names:
        raise RequestError(
            400,
            "this model ties its embedding table and its unembedding, which can have no separate "
            "adapter; set train_unembed=False",
            param="lora_config",
        )
    if not names:
        raise RequestError(400, "lora_config trains no layer of this model", param="lora_config")
    return tuple(dict.fromkeys(map(adapter_name, names)))


def slot_adapters(decoder: DecoderConfig, n: int, rank: int) -> LoRA:
    """Room for `n` adapters of at most this rank in one engine."""
    switches = dict.fromkeys(PARTS, True) | {"train_unembed": not decoder.tied}
    return LoRA(rank, float(rank), targets=targets(decoder, switches), n_stacked=n)


@dataclasses.dataclass(frozen=True)
class AdapterFiles:
    """Writes and reads the folders of adapters of one base model; call on the device's thread."""

    trainer: Trainer
    base: str  # the name of the base model
    source: Path  # its folder

    def save_weights(self, folder: Path, adapter: TrainedAdapter) -> None:
        """Writes the weights in PEFT's format; replaces the folder."""
        self._save(folder, adapter, adapter.weights)

    def save_state(self, folder: Path, adapter: TrainedAdapter) -> None:
        """Writes weights and moments, each in PEFT's format; the folder appears complete.

        A gradient since the last step is not part of it.
        """
        with atomic_folder(folder) as target:
            self._save(target / WEIGHTS, adapter, adapter.weights)
            self._save(target / FIRST, adapter, adapter.moments.mu)
            self._save(target / SECOND, adapter, adapter.moments.nu)
            write_json(target / STATE, {"n_steps": adapter.n_steps})

    def load(self, folder: Path, *, optimizer: bool) -> TrainedAdapter:
        """The adapter of a saved state, with new moments unless `optimizer` is set."""
        lora = adapter_config(folder / WEIGHTS)
        blank = self.trainer.create(lora, seed=0)
        weights = self._read(folder / WEIGHTS, blank)
        if not optimizer:
            return dataclasses.replace(blank, weights=weights, moments=start_moments(weights))
        n_steps = read_object(folder / STATE, "choose another checkpoint")["n_steps"]
        moments = blank.moments._replace(
            count=jnp.asarray(np.int32(n_steps)),
            mu=self._read(folder / FIRST, blank),
            nu=self._read(folder / SECOND, blank),
        )
        return dataclasses.replace(blank, weights=weights, moments=moments)

    def _save(self, folder: Path, adapter: TrainedAdapter, arrays: Tree) -> None:
        save_adapter(folder, adapter.model(arrays), base=self.base, source=self.source)

    def _read(self, folder: Path, blank: TrainedAdapter) -> Tree:
        model = blank.model(blank.weights)
        return split(read_adapter(folder, model, self.trainer.rules, jnp.float32))[0]
