"""Messages between a rollout worker and the trainer's process."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.config.keys import RunConfig
from jaxrl.data.digest import digest
from jaxrl.engine.api import EngineStats, Generated, Request
from jaxrl.models.config import DecoderConfig
from jaxrl.models.vision.config import TowerConfig
from jaxrl.rollout.remote.images import ImageMessage
from jaxrl.rollout.remote.weights import WeightUpdate
from jaxrl.types import Tree


@dataclasses.dataclass(frozen=True)
class WorkerSettings:
    """The engine that every worker of a run builds."""

    cfg: RunConfig
    decoder: DecoderConfig  # "auto" values resolved
    dtype: jnp.dtype  # of training's weights
    eos_ids: tuple[int, ...]
    platform: str  # of JAX
    model: str  # `model_digest` of the weights that it gets
    tower: TowerConfig | None = None  # whose features requests have; None: a run without images


@dataclasses.dataclass(frozen=True)
class Location:
    """Where a worker's process runs. Its first answer, once a host is free for it."""

    host: str
    pid: int
    address: str = ""  # host:port of this host that was free then

    def __str__(self) -> str:
        return f"{self.host} (process {self.pid})"


@dataclasses.dataclass(frozen=True)
class Registration:
    """A worker's answer when it has an engine."""

    capacity: int = 0  # sequences that it decodes at a time
    refused: str = ""  # why it cannot work for this run; "" if it can


@dataclasses.dataclass(frozen=True)
class Work:
    """The work of a worker in one dispatch, in this order."""

    free: tuple[int, ...]  # requests to cancel
    update: WeightUpdate | None  # weights to load; None: it has them
    version: int  # policy version of the weights
    submit: tuple[tuple[int, Request], ...]  # (number of the request, request without features)
    images: ImageMessage = dataclasses.field(default_factory=ImageMessage)  # of these requests


@dataclasses.dataclass(frozen=True)
class WorkDone:
    """The tokens of one dispatch."""

    generated: tuple[tuple[int, Generated], ...]  # (number of the request, new tokens)
    stats: EngineStats


def model_digest(weights: Tree) -> str:
    """Hash of the names, shapes and dtypes of (abstract) weights."""
    leaves = jax.tree_util.tree_flatten_with_path(weights)[0]
    return digest(
        f"{jax.tree_util.keystr(path)} {tuple(leaf.shape)} {jnp.dtype(leaf.dtype).name}".encode()
        for path, leaf in leaves
    )


def refusal(expected: dict[str, Any], found: dict[str, Any]) -> str:
    """How a worker's versions differ from the trainer's; "" if they do not."""
    return "; ".join(
        f"{name} is {found.get(name)} on the worker and {value} in the trainer"
        for name, value in expected.items()
        if found.get(name) != value
    )
