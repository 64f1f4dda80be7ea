"""Adapters of a vision tower and its projector, chosen by regular expressions over their names."""

import dataclasses
import re
from typing import Any

import jax
from jax.typing import DTypeLike

from jaxrl.config.keys import LoRAConfig
from jaxrl.models.config import LoRA
from jaxrl.models.layers.linear import Linear
from jaxrl.models.lora import check_rank, new_lora, with_new_parts
from jaxrl.models.vision.config import TowerConfig
from jaxrl.models.vision.tower import Tower, tower_specs
from sharding import Rules

BLOCK = re.compile(r"\.\d+\.(?=\D)")  # the number of a block, not the last part "mlp.0"


def linear_layers(cfg: TowerConfig) -> dict[str, tuple[int, int]]:
    """(out, in) of the linear layers of a tower, by name: "model.visual.blocks.attn.qkv", ...

    The embedding of patches is not one, nor is a projector that files do not store as one.
    """
    specs = tower_specs(dataclasses.replace(cfg, lora=None))
    parts = [specs.blocks, specs.merger, specs.deepstack]
    found: dict[str, tuple[int, int]] = {}

    def add(module: Any) -> None:
        if isinstance(module, Linear):
            spec: Any = module.w
            found[BLOCK.sub(".", spec.hf.removesuffix(".weight"))] = spec.hf_shape

    jax.tree.map(add, parts, is_leaf=lambda node: isinstance(node, Linear))
    return found


def tower_adapters(cfg: LoRAConfig, tower: TowerConfig) -> LoRA | None:
    """The adapters of a tower that the config asks for; None if it names no layer of the tower.

    A pattern must match a whole name, with or without "model.", so names of the language model
    such as q_proj or all-linear leave the tower as it is. Raises ValueError for a rank above that
    of a layer.
    """
    sizes = linear_layers(tower)

    def matched(name: str, patterns: tuple[str, ...]) -> bool:
        forms = {name, name.removeprefix("model.")}
        return any(re.fullmatch(pattern, form) for pattern in patterns for form in forms)

    names = [
        name
        for name in sizes
        if matched(name, cfg.target_modules) and not matched(name, cfg.exclude_modules)
    ]
    if not (cfg.rank and names):
        return None
    check_rank(cfg, {name: sizes[name] for name in names})
    return new_lora(cfg, tuple(names))


def add_tower_adapters(
    base: Tower, lora: LoRA, *, seed: int, rules: Rules, dtype: DTypeLike
) -> Tower:
    """The tower with new adapters, with which it computes the same. The base is shared."""
    specs = tower_specs(dataclasses.replace(base.cfg, lora=lora))
    return with_new_parts(base, specs, lora, seed=seed, rules=rules, dtype=dtype)
