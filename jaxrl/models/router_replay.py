"""Router replay: forward passes that record the experts of every token, or get them as an input.

Only the choice is replayed. The weights of the chosen experts are those of the current router, so
its logits have a gradient.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Int, Integer

from jaxrl.models.config import DecoderConfig, MoEConfig
from jaxrl.models.layers.moe import MoE
from jaxrl.models.layers.router import RouterLoad
from jaxrl.models.layers.row_ops import LayerPlace
from jaxrl.types import Tree


def routing_shape(cfg: DecoderConfig) -> tuple[int, int]:
    """(layers with experts, experts of a token in each).

    Raises ValueError for a dense model, and for layers with different numbers of experts.
    """
    found = {(ffn.E, ffn.top_k) for ffn in cfg.expert_layers}
    if len(found) != 1:
        what = f"layers with {sorted(found)} (experts, experts of a token)" if found else "none"
        raise ValueError(
            f"router replay needs layers with equal numbers of experts, but this {cfg.family} "
            f"model has {what}; set config.learner.router_replay='off'"
        )
    return len(cfg.expert_layers), cfg.expert_layers[0].top_k


def expert_dtype(cfg: DecoderConfig) -> np.dtype:
    """The smallest dtype of an expert's index."""
    return np.dtype(np.uint8 if cfg.expert_layers[0].E <= 256 else np.uint16)


def recording(model: Tree) -> Tree:
    """The same arrays, as a model whose router load has the experts of every token."""

    def changed(node: object) -> object:
        if not isinstance(node, MoE):
            return node
        new = jax.tree.map(lambda leaf: leaf, node)
        new.records = True
        return new

    return jax.tree.map(changed, model, is_leaf=lambda node: isinstance(node, MoE))


def recorded(load: RouterLoad | None, dtype: DTypeLike) -> Integer[Array, "B T L k"]:
    """The experts in the load of a recording model."""
    assert load is not None and load.experts is not None, "a recording mixture of experts"
    return jnp.moveaxis(load.experts, 0, 2).astype(dtype)


def with_experts(
    cfg: DecoderConfig, places: Sequence[LayerPlace], experts: Int[Array, "L B T k"]
) -> list[LayerPlace]:
    """The places of all layers, or of all stacks, with the experts that they replay.

    `experts` are those of the layers with experts, in order.
    """
    mixtures = [isinstance(layer.ffn, MoEConfig) for layer in cfg.layers]
    rows = np.cumsum(mixtures) - 1
    firsts = [layers.start for run in cfg.runs for layers in run] if cfg.stacked else range(cfg.L)
    spec = jax.typeof(experts).sharding.spec

    def replayed(place: LayerPlace, first: int) -> LayerPlace:
        if not mixtures[first]:
            return place
        index = rows[first] if place.index is None else jnp.asarray(rows)[place.index]
        out = jax.P(*spec[1:]) if place.index is None else jax.P(None, *spec[1:])
        return dataclasses.replace(place, experts=experts.at[index].get(out_sharding=out))

    return [replayed(*pair) for pair in zip(places, firsts, strict=True)]
