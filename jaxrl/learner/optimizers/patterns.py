"""Learning rate factors and weight decay of every tensor, by name and by layer."""

import dataclasses
import difflib
import re
from collections.abc import Sequence

import numpy as np

from jaxrl.config.keys import LearnerConfig
from jaxrl.models.spec import ParamSpec, hf_names, is_spec, map_specs
from jaxrl.types import Tree

LAYER = re.compile(r"\blayers\.(\d+)\.")
N_SHOWN = 4  # names in an error message


def weight_decays(cfg: LearnerConfig, specs: Tree) -> Tree:
    """A number per parameter, or an array that broadcasts over one of stacked layers or experts.

    The first of `cfg.weight_decays` whose pattern is found in the tensor's name counts; otherwise
    `cfg.weight_decay` for matrices, and 0 for norms, biases and filters over time. Raises
    ValueError for a pattern that is found in no name.
    """
    patterns = _parse(cfg.weight_decays, specs, "learner.weight_decays")

    def decay(spec: ParamSpec) -> float | np.ndarray:
        default = cfg.weight_decay if spec.multiplies else 0.0
        return _per_tensor(spec, [_first(patterns, name, default) for name in hf_names(spec)])

    return map_specs(decay, specs)


def lr_factors(cfg: LearnerConfig, specs: Tree) -> Tree | None:
    """As `weight_decays`, factors of the learning rate; None if all of them are 1.

    lr_layer_decay^(L - i) for layer i of L, lr_layer_decay^(L + 1) for the embedding and 1 above
    the layers (https://arxiv.org/abs/2003.10555, table 7), times the first of `cfg.lr_factors`.
    """
    patterns = _parse(cfg.lr_factors, specs, "learner.lr_factors")
    if not patterns and cfg.lr_layer_decay == 1.0:
        return None
    layers = [int(found[1]) for name in _names(specs) if (found := LAYER.search(name))]
    n_layers = 1 + max(layers, default=-1)

    def factor(name: str) -> float:
        layer = LAYER.search(name)
        depth = n_layers - int(layer[1]) if layer else 0
        if "embed_tokens" in name:
            depth = n_layers + 1
        return cfg.lr_layer_decay**depth * _first(patterns, name, 1.0)

    return map_specs(lambda spec: _per_tensor(spec, list(map(factor, hf_names(spec)))), specs)


def found_patterns(cfg: LearnerConfig, specs: Tree) -> LearnerConfig:
    """The config without patterns that are found in no name: of a critic with the policy's keys."""
    names = _names(specs)

    def found(entries: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(e for e in entries if any(re.search(e.rpartition("=")[0], n) for n in names))

    return dataclasses.replace(
        cfg, lr_factors=found(cfg.lr_factors), weight_decays=found(cfg.weight_decays)
    )


def _parse(entries: Sequence[str], specs: Tree, key: str) -> list[tuple[re.Pattern, float]]:
    """(pattern, number) of entries "REGEX=NUMBER", each of which is found in a tensor's name."""
    names, patterns = _names(specs), []
    for entry in entries:
        pattern, _, number = entry.rpartition("=")
        patterns.append((re.compile(pattern), float(number)))
        if not any(re.search(pattern, name) for name in names):
            raise ValueError(
                f"config.{key} has {pattern!r}, which is found in no tensor's name; names are for "
                f"example {', '.join(_near(pattern, names))}"
            )
    return patterns


def _near(pattern: str, names: Sequence[str]) -> list[str]:
    """The names that are closest to a pattern, else the first names."""
    parts = sorted({part for name in names for part in name.split(".")})
    words = re.findall(r"\w{2,}", pattern.replace("\\", " "))
    near = [part for word in words for part in difflib.get_close_matches(word, parts, n=1)]
    matching = [name for name in names if all(part in name.split(".") for part in near)]
    return list(matching or names)[:N_SHOWN]


def _names(specs: Tree) -> list[str]:
    leaves: list[ParamSpec] = []
    map_specs(leaves.append, specs)
    assert all(map(is_spec, leaves))
    return [name for spec in leaves for name in hf_names(spec)]


def _first(patterns: list[tuple[re.Pattern, float]], name: str, default: float) -> float:
    return next((number for pattern, number in patterns if pattern.search(name)), default)


def _per_tensor(spec: ParamSpec, numbers: list[float]) -> float | np.ndarray:
    """One number if all tensors have the same, else an array with the axes of the parameter."""
    if len(set(numbers)) == 1:
        return numbers[0]
    lead = spec.stacked_shape
    return np.asarray(numbers, np.float32).reshape(*lead, *[1] * (len(spec.shape) - len(lead)))
