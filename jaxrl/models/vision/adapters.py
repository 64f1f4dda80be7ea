"""The layers of a vision tower and its projector that may have adapters."""

import dataclasses
from typing import Any

import jax

from jaxrl.models.layers.linear import Linear
from jaxrl.models.vision.config import TowerConfig
from jaxrl.models.vision.names import without_number
from jaxrl.models.vision.tower import tower_specs


def linear_layers(cfg: TowerConfig) -> dict[str, tuple[int, int]]:
    """(out, in) of the linear layers of a tower, by name: "model.visual.blocks.attn.qkv", ...

    Of a tower whose blocks are frozen, those of the projector. The embedding of patches is not one,
    nor is a projector that files do not store as one.
    """
    specs = tower_specs(dataclasses.replace(cfg, lora=None))
    parts = [*([] if cfg.frozen else [specs.blocks]), specs.merger, specs.deepstack]
    found: dict[str, tuple[int, int]] = {}

    def add(module: Any) -> None:
        if isinstance(module, Linear):
            spec: Any = module.w
            found[without_number(spec.hf.removesuffix(".weight"))] = spec.hf_shape

    jax.tree.map(add, parts, is_leaf=lambda node: isinstance(node, Linear))
    return found
