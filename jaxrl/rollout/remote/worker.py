"""A rollout worker: an engine on its devices, driven dispatch by dispatch.

A worker that spans hosts has a process on each of them (see groups.py).
"""

import os
import pickle
import socket
from collections.abc import Callable

import jax

from jaxrl.config.keys import DistributedConfig
from jaxrl.layout import worker_layout, worker_mesh
from jaxrl.rollout.paged_engine import paged_engine
from jaxrl.rollout.remote.images import ReceivedImages
from jaxrl.rollout.remote.weights import Get, LoadedWeights
from jaxrl.rollout.remote.work import (
    Location,
    Registration,
    Work,
    WorkDone,
    WorkerSettings,
    model_digest,
    refusal,
)
from jaxrl.runtime.backend import open_backend
from jaxrl.runtime.multihost import initialize
from jaxrl.runtime.ray_cluster import free_address
from jaxrl.runtime.versions import versions
from jaxrl.types import Tree


class RolloutWorker:
    """Runs in its own process, as a Ray actor. It needs no files except the code."""

    def __init__(self, get: Get, host_ip: Callable[[], str] = lambda: "127.0.0.1"):
        """`get` reads objects from the store that has the weights.

        `host_ip` gives the address of this host for the other hosts of the worker.
        """
        self._get, self._host_ip = get, host_ip
        self._numbers: dict[int, int] = {}  # slot of the engine -> number of its request
        self._images = ReceivedImages()
        self._version: int | None = None
        self._params: Tree | None = None

    def locate(self) -> Location:
        """Its host and process."""
        return Location(socket.gethostname(), os.getpid(), free_address(self._host_ip()))

    def register(
        self,
        expected: dict[str, str],
        settings: bytes,
        distributed: DistributedConfig | None = None,
    ) -> Registration:
        """Builds the engine of pickled WorkerSettings, if this process has the `expected` versions.

        With `distributed`, it first joins the other processes of its worker. Raises ValueError if
        they cannot be reached, or if the devices do not fit the engine.
        """
        if refused := refusal(expected, versions()):
            return Registration(refused=f"{socket.gethostname()}: {refused}")
        if distributed is not None:
            initialize(distributed)
        found: WorkerSettings = pickle.loads(settings)
        if (platform := open_backend()) != found.platform:
            return Registration(
                refused=f"{socket.gethostname()}: JAX runs on {platform} on the worker and on "
                f"{found.platform} in the trainer"
            )
        return self._build(found)

    def dispatch(self, work: Work) -> WorkDone:
        """Does the work, and generates once if there are requests."""
        slots = {number: slot for slot, number in self._numbers.items()}
        with jax.set_mesh(self._mesh):
            for number in work.free:
                if (slot := slots.get(number)) is not None:  # it may have ended
                    self._engine.free(slot)
                    del self._numbers[slot]
            if work.update is not None:
                first = self._params is None
                self._params = self._weights.load(work.update, self._get)
                if first:
                    self._engine.warmup(self._params)
            if work.version != self._version:
                self._engine.set_version(work.version)
                self._version = work.version
            self._images.receive(work.images)
            for number, request in work.submit:
                whole = self._images.with_features(request)
                self._numbers[self._engine.submit(whole)] = number
            return self._generate()

    def _generate(self) -> WorkDone:
        done = []
        for one in self._engine.generate(self._params) if self._numbers else ():
            number = self._numbers[one.slot]
            if one.finish:
                del self._numbers[one.slot]
            done.append((number, one))
        return WorkDone(tuple(done), self._engine.take_stats())

    def _build(self, settings: WorkerSettings) -> Registration:
        cfg = settings.cfg
        self._mesh = worker_mesh(cfg, jax.devices())
        layout = worker_layout(cfg, settings.decoder, settings.dtype, self._mesh)
        abstract = layout.abstract_weights(settings.decoder, self._mesh)
        if model_digest(abstract) != settings.model:
            host = socket.gethostname()
            return Registration(refused=f"{host}: its model has other weights than the trainer's")
        self._weights = LoadedWeights(abstract, keep_bits=cfg.schedule.weight_transfer == "delta")
        self._engine = paged_engine(
            cfg, cfg.rollout, layout, settings.decoder, settings.eos_ids, tower=settings.tower
        )
        n_replicas = self._mesh.shape["replica"]
        return Registration(capacity=n_replicas * cfg.rollout.max_num_seqs)
