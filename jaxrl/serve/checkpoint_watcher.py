"""Loads the checkpoints of a run for serving, and watches for new ones while the run trains."""

import dataclasses
import functools
import logging
import threading
from pathlib import Path

import jax

from jaxrl.checkpoint.checkpointer import complete_steps, find_step
from jaxrl.checkpoint.errors import CheckpointError, OrbaxLogFilter
from jaxrl.checkpoint.saved_arrays import read_weights
from jaxrl.config.saved import read_run_config
from jaxrl.layout import Layout
from jaxrl.models.decoder import Decoder, with_heads
from jaxrl.models.layers.linear import Linear
from jaxrl.models.layers.moe import MoE
from jaxrl.models.lora import checkpoint_part
from jaxrl.serve.engine_thread import ServingThread
from jaxrl.serve.metrics import ServerMetrics
from jaxrl.types import Tree

log = logging.getLogger(__name__)
POLL_S = 2.0  # between two scans of the checkpoint folder


@dataclasses.dataclass(frozen=True)
class Checkpoints:
    """The policy checkpoints of a run."""

    directory: Path
    # ShapeDtypeStructs with the engine's dtype and shardings, and the heads that the run trains.
    policy: Decoder
    layout: Layout  # of the engine

    def newest(self) -> int | None:
        """The last step with a complete checkpoint; None if there is none."""
        return max(complete_steps(self.directory), default=None)

    @property
    def only_adapters(self) -> bool:
        """Whether the checkpoints have adapters, of a base model that does not change."""
        return self.policy.cfg.lora is not None

    def read(self, step: int) -> Tree:
        """The language model of a step, or its adapters, in host memory. Raises CheckpointError."""
        weights = read_weights(self.directory, step, checkpoint_part(self.policy))
        return weights if self.only_adapters else _language_model(weights)

    def place(self, weights: Tree, old: Tree = None) -> Decoder:
        """Copies weights from `read` to the devices, in the engine's layout, in place of `old`.

        Adapters replace the ones of `old`, whose base model is kept. Everything that is replaced is
        freed first.
        """
        if self.only_adapters:
            return replace_leaves(old, weights)
        for leaf in jax.tree.leaves(old):
            leaf.delete()
        return self._place_model(weights)

    def _place_model(self, weights: Decoder) -> Decoder:
        """Copies module by module, so that device memory peaks at the weights plus one module."""

        def put(part: Tree, like: Tree) -> Tree:
            shardings = jax.tree.map(lambda leaf: leaf.sharding, like)
            return jax.block_until_ready(self.layout.prepare(jax.device_put(part, shardings)))

        like = _language_model(self.policy)
        return jax.tree.map(put, weights, like, is_leaf=lambda node: isinstance(node, Linear | MoE))


def replace_leaves(old: Tree, new: Tree) -> Tree:
    """The tree `old` with the leaves of `new`, in its shardings; replaced ones are freed."""
    leaves = dict(jax.tree_util.tree_leaves_with_path(new))

    def replace(path, leaf: jax.Array) -> jax.Array:
        if path not in leaves:
            return leaf
        sharding = leaf.sharding
        leaf.delete()
        return jax.device_put(leaves[path], sharding)

    return jax.block_until_ready(jax.tree_util.tree_map_with_path(replace, old))


def _language_model(policy: Decoder) -> Decoder:
    """The policy without a value head."""
    return with_heads(policy, ("vocab",))


def first_step(directory: Path, wanted: str | None, *, follow: bool) -> int:
    """The step to serve first: `wanted` (a number, last or best) if given, else the newest.

    0 (the run's initial model) with `follow` if the run has no checkpoint yet.
    Raises ValueError if there is no such checkpoint.
    """
    steps = complete_steps(directory)
    if wanted is None and (steps or follow):
        return max(steps, default=0)
    if not steps:
        raise ValueError(
            f"{directory} has no complete checkpoint; wait for the first one, or set --follow to "
            "start with the initial model of the run"
        )
    run = read_run_config(directory.parent)
    assert run is not None and wanted is not None
    return find_step(directory, wanted, run.checkpoint)


class CheckpointWatcher:
    """A thread that reads new checkpoints into host memory and passes them to the engine's thread.

    It handles one checkpoint at a time. A checkpoint that cannot be read, or that belongs to a
    different model, is logged and skipped.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        engine: ServingThread,
        metrics: ServerMetrics,
        *,
        poll_s: float = POLL_S,
    ):
        self._checkpoints, self._engine, self._metrics = checkpoints, engine, metrics
        self._poll_s = poll_s
        self._last_step = engine.step  # last step that was tried
        self._log_filter = OrbaxLogFilter()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="checkpoint-watcher", daemon=True)

    def start(self) -> None:
        self._log_filter.install()
        self._thread.start()

    def stop(self) -> None:
        """Stops watching; a read in progress completes and its weights are dropped."""
        self._stopped.set()
        self._log_filter.remove()

    def _run(self) -> None:
        while not self._stopped.wait(self._poll_s):
            if not self._engine.updating:
                try:
                    self._load_newest()
                except (CheckpointError, OSError) as error:
                    self._metrics.weights_failures.inc()
                    log.warning("%s; still serving step %s", error, self._engine.step)

    def _load_newest(self) -> None:
        newest = self._checkpoints.newest()
        if newest in (None, self._last_step):
            return
        self._last_step = newest
        weights = self._checkpoints.read(newest)
        self._engine.update_weights(functools.partial(self._checkpoints.place, weights), newest)
