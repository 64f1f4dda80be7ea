"""Values that differ between layers with equal parameters: rotation, window, cache, inputs."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxrl.models.cache_layout import cache_places
from jaxrl.models.config import AttentionConfig, DecoderConfig, MLAConfig
from jaxrl.models.layers.rope import Rotation, rotations
from jaxrl.models.layers.row_ops import LayerPlace


def layer_place(cfg: DecoderConfig, layer: int, inputs: jax.Array | None) -> LayerPlace:
    """The place of one layer of a list, whose cache is that of a model of one layer."""
    rotation = jax.tree.map(lambda a: a[0], _rotations(cfg, range(layer, layer + 1)))
    own = None if inputs is None else inputs[layer]
    return LayerPlace(rotation, window=None, index=None, cache=None, inputs=own)


def stacked_places(cfg: DecoderConfig) -> list[LayerPlace]:
    """The places of the layers of each stack, with a leading axis."""

    def place(layers: range) -> LayerPlace:
        # A traced window cannot be 0 for "none", so such layers get the largest one.
        windows = [cfg.window(i) or np.iinfo(np.int32).max for i in layers]
        return LayerPlace(
            jax.tree.map(jnp.asarray, _rotations(cfg, layers)),
            None if len(set(windows)) == 1 else jnp.asarray(windows, jnp.int32),
            jnp.asarray(layers, jnp.int32),
            jnp.asarray([cache_places(cfg)[i].index for i in layers], jnp.int32),
        )

    return [place(layers) for run in cfg.runs for layers in run]


def with_inputs(
    cfg: DecoderConfig, places: list[LayerPlace], inputs: Float[Array, "L B T P"]
) -> list[LayerPlace]:
    """The places of stacked layers with the inputs of each layer."""
    ranges = [layers for run in cfg.runs for layers in run]
    return [
        dataclasses.replace(place, inputs=inputs[layers.start : layers.stop : layers.step])
        for place, layers in zip(places, ranges, strict=True)
    ]


def with_deep(places: Sequence[LayerPlace], deep: Float[Array, "n B T D"]) -> list[LayerPlace]:
    """The places of a list of layers, whose first ones have a sum after them."""
    first = [dataclasses.replace(place, deep=own) for place, own in zip(places, deep, strict=False)]
    return [*first, *places[len(first) :]]


def _rotations(cfg: DecoderConfig, layers: range) -> Rotation | None:
    mixers = [cfg.layers[i].mixer for i in layers]
    found = [mixer for mixer in mixers if isinstance(mixer, AttentionConfig | MLAConfig)]
    return rotations(found) if found else None
