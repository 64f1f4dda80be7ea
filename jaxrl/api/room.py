"""The common form of all adapters in training: one program computes those of every client.

An adapter of a smaller rank, or of fewer layers, is padded with zeros. They stay zero: where A and
B are zero, the gradients of both are.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from jaxrl.models.config import DecoderConfig, LoRA
from jaxrl.models.decoder import Decoder, decoder_specs
from jaxrl.models.lora import combine, split
from jaxrl.models.spec import ParamSpec
from jaxrl.types import Tree
from sharding import Rules

Arrays = list[Any]  # one per array of A and B, in the order of the room's model


@dataclasses.dataclass(frozen=True)
class AdapterRoom:
    """Space for an adapter of at most the rank, and of the layers, of `lora`, whose scale is 1."""

    decoder: DecoderConfig  # of the base model
    lora: LoRA
    rules: Rules

    @functools.cached_property
    def specs(self) -> list[tuple[Any, ParamSpec]]:
        """(path in the model, shape) of each array."""
        return jax.tree_util.tree_leaves_with_path(split(self._model_specs)[0])

    @functools.cached_property
    def _model_specs(self) -> Decoder:
        return decoder_specs(dataclasses.replace(self.decoder, lora=self.lora))

    def pad(self, model: Decoder) -> Arrays:
        """float32 arrays of the adapter of `model`.

        Raises ValueError for a larger rank and for layers that have no room.
        """
        own = dict(jax.tree_util.tree_leaves_with_path(split(model)[0]))
        lora, mesh = model.cfg.lora, jax.sharding.get_mesh()
        assert lora is not None
        if lora.rank > self.lora.rank or set(lora.targets) - set(self.lora.targets):
            raise ValueError(
                f"an adapter of the rank {lora.rank} with the layers {', '.join(lora.targets)} has "
                f"no room: the server trains up to the rank {self.lora.rank} (--max-rank) and the "
                f"layers {', '.join(self.lora.targets)}"
            )

        def padded(path: Any, spec: ParamSpec) -> jax.Array:
            whole = np.zeros(spec.shape, np.float32)
            if path in own:
                values = np.asarray(own[path])
                whole[tuple(map(slice, values.shape))] = values
            return jax.device_put(whole, NamedSharding(mesh, self.rules.spec(*spec.axes)))

        return [padded(path, spec) for path, spec in self.specs]

    def cut(self, arrays: Arrays, model: Decoder) -> Decoder:
        """The model with the adapter of these arrays, without padding, in place of its adapter."""
        found = {path: array for (path, _), array in zip(self.specs, arrays, strict=True)}
        weights, frozen = split(model)

        def leaf(path: Any, own: jax.Array) -> jax.Array:
            values = np.asarray(found[path])[tuple(map(slice, own.shape))]
            return jax.device_put(values, own.sharding)

        return combine(jax.tree.map_with_path(leaf, weights), frozen)

    def frozen(self, base: Decoder) -> Tree:
        """The arrays of the base in the form that `model` takes."""
        found = dict(jax.tree_util.tree_leaves_with_path(base))
        specs = split(self._model_specs)[1]
        return jax.tree.map_with_path(lambda path, _: found[path], specs)

    def model(self, arrays: Sequence[jax.Array], frozen: Tree) -> Decoder:
        """The base model with padded arrays; part of a program."""
        structure = jax.tree.structure(split(self._model_specs)[0])
        return combine(jax.tree.unflatten(structure, arrays), frozen)

    def scaled(
        self, arrays: Sequence[jax.Array], scale: jax.Array, dtype: DTypeLike
    ) -> list[jax.Array]:
        """The arrays with `scale`, alpha / rank, multiplied into each B, in the dtype."""
        is_b = [path[-1].name == "b" for path, _ in self.specs]
        pairs = zip(arrays, is_b, strict=True)
        return [(array * scale if b else array).astype(dtype) for array, b in pairs]
