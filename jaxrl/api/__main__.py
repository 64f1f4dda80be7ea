"""python -m jaxrl.api --model=FOLDER: a training API with the interface of the package `tinker`.

Options and endpoints: docs/how_to/training_api.md and --help.
"""

import argparse
import functools
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jaxrl.api.options import KEYS_VARIABLE, read
from jaxrl.config.keys import RunConfig
from jaxrl.runtime.start import begin_loading

if __name__ == "__main__":  # answers a mistyped argument before the imports that take seconds
    OPTIONS, CONFIG = read(sys.argv[1:])
    begin_loading()

try:
    import prometheus_client  # noqa: F401, the only package that the extra `serve` installs
except ModuleNotFoundError as missing:
    from jaxrl.config.packages import install_advice

    raise SystemExit(f"error: there is no {missing.name}; {install_advice('serve')}") from missing

import jax

from jaxrl.api.adapters import AdapterFiles, room_for
from jaxrl.api.app import ApiApp
from jaxrl.api.models import TrainedModels
from jaxrl.api.room import AdapterRoom
from jaxrl.api.sampling import AdapterSlots, Sampler, loader
from jaxrl.api.service import Service
from jaxrl.api.store import Store
from jaxrl.api.training import Trainer
from jaxrl.http.body import BodyReader
from jaxrl.http.connection import ConnectionLimits, HttpServer
from jaxrl.http.listener import require_loopback
from jaxrl.learner.image_patches import BatchImages, TowerInputs
from jaxrl.models.decoder import Decoder
from jaxrl.models.lora import without_adapters
from jaxrl.models.vision.files import add_tower
from jaxrl.models.vision.towers import known_tower, with_trained_tower
from jaxrl.serve.compilation import BackgroundCompiler
from jaxrl.serve.engine_thread import ServingThread
from jaxrl.serve.metrics import ServerMetrics
from jaxrl.serve.model import Model, open_model
from jaxrl.serve.run import run_server

WRITERS = 2  # threads that detokenize responses


def serve(options: argparse.Namespace, run: RunConfig) -> int:
    """Serves until Ctrl-C. Returns the exit status."""

    def opened(listening: socket.socket) -> HttpServer:
        if not options.keys:
            require_loopback(listening, f"set --keys, or {KEYS_VARIABLE}, to a file of API keys")
        return server(open_service(options, run), options)

    return run_server(
        options, opened, lambda address: f"training API of {options.name} on {address}"
    )


def open_service(options: argparse.Namespace, run: RunConfig) -> Service:
    """Opens the run folder, loads the model, and creates the service for it."""
    store = Store(Path(options.run_dir).expanduser())
    return make_service(options, run, store, load_model(options, run))


def load_model(options: argparse.Namespace, run: RunConfig) -> Model:
    """The model with room for the adapters that the engine samples from."""
    if options.full:
        return open_model(run, max_len=options.max_len)
    room = functools.partial(room_for, rank=options.max_rank, n_stacked=options.slots)
    return open_model(run, max_len=options.max_len, room=room)


def make_service(
    options: argparse.Namespace, run: RunConfig, store: Store, model: Model
) -> Service:
    metrics, layout = ServerMetrics(), model.layout
    engine = ServingThread(
        model.engine,
        model.params,
        model.mesh,
        metrics,
        max_tasks=2 * options.max_waiting,
    )
    base = without_adapters(model.params)
    images: BatchImages | None = model.encoders[0] if model.encoders else None
    if options.train_vision:
        images = TowerInputs(model.encoders[0])
        with jax.set_mesh(model.mesh):
            base = with_tower(base, model)
    lora = None if options.full else room_for(base.cfg, options.max_rank)
    room = AdapterRoom(base.cfg, lora, layout.rules)
    with jax.set_mesh(model.mesh):
        n_ranks = layout.rules.n_shards("batch")
    trainer = Trainer(run, base, room, n_ranks, layout.dtype, images)
    models = TrainedModels(
        store,
        engine,
        AdapterFiles(trainer, options.name, model.folder),
        store.folder / "checkpoints",
        options.max_rank,
        options.max_models,
        options.lost_after_s,
    )
    models.remove_unknown()
    sampler = Sampler(
        model,
        engine,
        metrics,
        ThreadPoolExecutor(WRITERS, "writer"),
        AdapterSlots(options.slots, loader(model, engine, trains_all=options.full)),
        options.timeout_s,
        trains_all=options.full,
    )
    return Service(
        store,
        models,
        sampler,
        BackgroundCompiler(model.engine, model.params, model.mesh),
        name=options.name,
        max_waiting=options.max_waiting,
        max_queued=options.max_queued,
    )


def with_tower(base: Decoder, model: Model) -> Decoder:
    """The base model with its vision tower, whose layers may have adapters."""
    rules, dtype = model.layout.rules, model.layout.dtype
    decoder = with_trained_tower(base.cfg, known_tower(model.folder), "none")
    return add_tower(base, model.folder, rules, decoder, dtype)


def server(service: Service, options: argparse.Namespace) -> HttpServer:
    limits = ConnectionLimits(
        options.max_connections, read_s=options.read_timeout_s, write_s=options.write_timeout_s
    )
    bodies = BodyReader(options.max_body_mib << 20, 4 * options.max_body_mib << 20)
    app = ApiApp(service, bodies, options.keys).app()
    return HttpServer(
        app,
        limits,
        end_responses=service.sampler_of.engine.request_stop,
        begin_shutdown=service.begin_shutdown,
    )


if __name__ == "__main__":
    sys.exit(serve(OPTIONS, CONFIG))
