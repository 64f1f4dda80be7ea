"""The common form of all adapters in training: one program computes those of every client.

An adapter of a smaller rank, or of fewer layers, is padded with zeros. They stay zero: where A and
B are zero, the gradients of both are. Arrays of one shape, as of all layers, are one array with a
further axis, as the time that a program takes to start grows with the number of its arrays.

A room without adapters is that of all weights of one model.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from jaxrl.models.config import DecoderConfig, LoRA
from jaxrl.models.decoder import Decoder, decoder_specs
from jaxrl.models.lora import combine, split
from jaxrl.models.spec import ParamSpec
from jaxrl.types import Tree
from sharding import Rules

Arrays = list[Any]  # one per group of A's or B's of one shape


@dataclasses.dataclass(frozen=True)
class AdapterRoom:
    """Space for an adapter of at most the rank, and of the layers, of `lora`, whose scale is 1."""

    decoder: DecoderConfig  # of the base model
    lora: LoRA | None  # None: all weights are trained
    rules: Rules

    @functools.cached_property
    def specs(self) -> list[tuple[Any, ParamSpec]]:
        """(path in the model, shape) of each array."""
        return jax.tree_util.tree_leaves_with_path(split(self._model_specs)[0])

    @functools.cached_property
    def groups(self) -> list[list[int]]:
        """The places in `specs` of the arrays of each group: all A or all B, and of one shape.

        Weights are not copied into groups.
        """
        if self.lora is None:
            return [[i] for i in range(len(self.specs))]
        found: dict[Any, list[int]] = {}
        for i, (path, spec) in enumerate(self.specs):
            found.setdefault((_name(path), spec.shape, spec.axes), []).append(i)
        return list(found.values())

    @property
    def group_specs(self) -> list[ParamSpec]:
        """The shape of each group, whose first axis are its arrays."""
        firsts = [(len(group), self.specs[group[0]][1]) for group in self.groups]
        return [
            dataclasses.replace(spec, shape=(n, *spec.shape), axes=(None, *spec.axes))
            for n, spec in firsts
        ]

    def grouped(self, leaves: Sequence[jax.Array], axis: int = 0) -> Arrays:
        """Arrays in the order of `specs`, stacked by groups; part of a program."""
        return [jnp.stack([leaves[i] for i in group], axis) for group in self.groups]

    def leaves(self, arrays: Arrays, axis: int = 0) -> list[jax.Array]:
        """The arrays of all groups, in the order of `specs`; the inverse of `grouped`."""
        found: dict[int, jax.Array] = {}
        for group, array in zip(self.groups, arrays, strict=True):
            parts = jnp.split(array, len(group), axis)
            found |= {i: part.squeeze(axis) for i, part in zip(group, parts, strict=True)}
        return [found[i] for i in range(len(found))]

    @functools.cached_property
    def _model_specs(self) -> Decoder:
        return decoder_specs(dataclasses.replace(self.decoder, lora=self.lora))

    def pad(self, model: Decoder) -> Arrays:
        """float32 arrays of the adapter of `model`, or of its weights.

        Raises ValueError for a larger rank and for layers that have no room.
        """
        own = dict(jax.tree_util.tree_leaves_with_path(split(model)[0]))
        lora, mesh = model.cfg.lora, jax.sharding.get_mesh()
        if self.lora is not None and lora is not None:
            self._check_fits(self.lora, lora)

        def padded(group: list[int], spec: ParamSpec) -> jax.Array:
            whole = np.zeros(spec.shape, np.float32)
            for part, i in zip(whole, group, strict=True):
                if (path := self.specs[i][0]) in own:
                    values = np.asarray(own[path])
                    part[tuple(map(slice, values.shape))] = values
            return jax.device_put(whole, NamedSharding(mesh, self.rules.spec(*spec.axes)))

        return list(map(padded, self.groups, self.group_specs))

    def _check_fits(self, room: LoRA, lora: LoRA) -> None:
        if lora.rank > room.rank or set(lora.targets) - set(room.targets):
            raise ValueError(
                f"an adapter of the rank {lora.rank} with the layers {', '.join(lora.targets)} has "
                f"no room: the server trains up to the rank {room.rank} (--max-rank) and the "
                f"layers {', '.join(room.targets)}"
            )

    def cut(self, arrays: Arrays, model: Decoder) -> Decoder:
        """The model with these arrays, without padding, in place of its adapter or weights."""
        found: dict[Any, np.ndarray] = {}
        for group, array in zip(self.groups, map(np.asarray, arrays), strict=True):
            found |= {self.specs[i][0]: part for i, part in zip(group, array, strict=True)}
        weights, frozen = split(model)

        def leaf(path: Any, own: jax.Array) -> jax.Array:
            values = found[path][tuple(map(slice, own.shape))]
            return jax.device_put(values, own.sharding)

        return combine(jax.tree.map_with_path(leaf, weights), frozen)

    def frozen(self, base: Decoder) -> Tree:
        """The arrays of the base in the form that `model` takes."""
        found = dict(jax.tree_util.tree_leaves_with_path(base))
        specs = split(self._model_specs)[1]
        return jax.tree.map_with_path(lambda path, _: found[path], specs)

    def model(self, leaves: Sequence[jax.Array], frozen: Tree) -> Decoder:
        """The base model with padded arrays, not in groups; part of a program."""
        structure = jax.tree.structure(split(self._model_specs)[0])
        return combine(jax.tree.unflatten(structure, leaves), frozen)

    def scaled(
        self, leaves: Sequence[jax.Array], scale: jax.Array, dtype: DTypeLike
    ) -> list[jax.Array]:
        """The arrays, not in groups, with `scale` (alpha / rank) in each B, in the dtype.

        The scale of weights is 1.
        """
        is_b = [_name(path) == "b" for path, _ in self.specs]
        pairs = zip(leaves, is_b, strict=True)
        return [(array * scale if b else array).astype(dtype) for array, b in pairs]


def _name(path: Any) -> str:
    """The last part of a path in a model."""
    return jax.tree_util.keystr(path[-1:], simple=True)
