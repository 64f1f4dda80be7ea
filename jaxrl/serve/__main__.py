"""python -m jaxrl.serve --model=runs/quickstart: an OpenAI-compatible server for one model.

With --follow it serves the policy of a run in training, and loads every new checkpoint.
Options and endpoints: docs/how_to/serving.md and --help.
"""

import argparse
import functools
import logging
import socket
import sys
from concurrent.futures import ThreadPoolExecutor

from jaxrl.config.keys import RunConfig
from jaxrl.runtime.start import begin_loading
from jaxrl.serve.options import KEY_VARIABLE, read

if __name__ == "__main__":  # answers a mistyped argument before the imports that take seconds
    OPTIONS, CONFIG = read(sys.argv[1:])
    begin_loading()

try:
    import prometheus_client  # noqa: F401, the only package that the extra `serve` installs
except ModuleNotFoundError as missing:
    from jaxrl.config.packages import install_advice

    raise SystemExit(f"error: there is no {missing.name}; {install_advice('serve')}") from missing

from jaxrl.checkpoint.errors import CheckpointError
from jaxrl.data.token_text import TokenTexts
from jaxrl.engine.device.batches import MAX_STOP_IDS
from jaxrl.http.body import BodyReader
from jaxrl.http.connection import ConnectionLimits, HttpServer
from jaxrl.http.listener import require_loopback
from jaxrl.serve.app import ServerState
from jaxrl.serve.checkpoint_watcher import CheckpointWatcher, first_step
from jaxrl.serve.compilation import BackgroundCompiler
from jaxrl.serve.engine_thread import ServingThread
from jaxrl.serve.metrics import ServerMetrics
from jaxrl.serve.model import Model, open_model
from jaxrl.serve.requests.prompt import ServerLimits, longest_token
from jaxrl.serve.run import run_server
from jaxrl.serve.structured.grammar import grammar_compiler
from jaxrl.serve.structured.tools import known_format

WRITERS = 2  # threads that detokenize and format responses


def serve(options: argparse.Namespace, run: RunConfig) -> int:
    """Serves until Ctrl-C. Returns the exit status."""
    logging.getLogger("jaxrl.serve").setLevel(logging.INFO)

    def opened(listening: socket.socket) -> HttpServer:
        require_key(options, listening)
        return server(open_service(options, run), options)

    names = ", ".join((options.name, *options.adapters))
    return run_server(options, opened, lambda address: f"serving {names} on {address}/v1")


def require_key(options: argparse.Namespace, listening: socket.socket) -> None:
    """Raises ValueError if other machines can reach the server without an API key."""
    if not options.api_key and not options.no_api_key:
        require_loopback(
            listening,
            f"set an API key with {KEY_VARIABLE} or --api-key, or allow every client with "
            "--no-api-key",
        )


def open_service(options: argparse.Namespace, run: RunConfig) -> ServerState:
    """Loads the model, compiles its first programs, and creates the service for it."""
    model, metrics = load_first_model(options, run), ServerMetrics()
    max_tasks = run.rollout.max_num_seqs + options.max_waiting
    limits = ServerLimits(
        model_name=options.name,
        max_model_len=model.max_model_len,
        vocab=model.engine.cfg.V,
        n_stop_ids=MAX_STOP_IDS - len(model.engine.eos_ids),
        n_choices=max_tasks,
        longest_token=longest_token(model.renderer.tokenizer),
        grammars=grammar_compiler(
            model.renderer.tokenizer, model.engine.cfg.V, model.engine.eos_ids
        ),
        tool_format=known_format(model.renderer.template, options.tool_format),
        images=model.images,
        adapters=tuple(options.adapters),
    )
    engine = ServingThread(
        model.engine,
        model.params,
        model.mesh,
        metrics,
        max_tasks=max_tasks,
        step=model.step,
    )
    watcher = None
    if options.follow and model.checkpoints is not None:
        watcher = CheckpointWatcher(model.checkpoints, engine, metrics)
    return ServerState(
        limits=limits,
        renderer=model.renderer,
        engine=engine,
        compiler=BackgroundCompiler(model.engine, model.params, model.mesh),
        watcher=watcher,
        metrics=metrics,
        bodies=BodyReader(options.max_body_mib << 20, options.max_bodies_mib << 20),
        parsers=ThreadPoolExecutor(options.max_parsing, "parser"),
        writers=ThreadPoolExecutor(WRITERS, "writer"),
        tokens=TokenTexts(model.renderer),
        api_key=options.api_key,
        timeout_s=options.timeout_s,
        encoders=model.encoders,
    )


def load_first_model(options: argparse.Namespace, run: RunConfig) -> Model:
    """The model to serve first.

    A run in training may delete a checkpoint during loading; this then loads a newer one.
    """
    adapters = tuple(options.adapters.values())
    open_step = functools.partial(open_model, run, max_len=options.max_len, adapters=adapters)
    if (checkpoints := options.checkpoints) is None:
        return open_step()
    step = first_step(checkpoints, options.step, follow=options.follow)
    while True:
        try:
            return open_step(checkpoints=checkpoints, step=step)
        except CheckpointError:
            failed, step = step, first_step(checkpoints, options.step, follow=options.follow)
            if step == failed:
                raise


def server(service: ServerState, options: argparse.Namespace) -> HttpServer:
    limits = ConnectionLimits(
        options.max_connections, read_s=options.read_timeout_s, write_s=options.write_timeout_s
    )
    return HttpServer(
        service.app(),
        limits,
        end_responses=service.engine.request_stop,
        begin_shutdown=service.begin_shutdown,
    )


if __name__ == "__main__":
    sys.exit(serve(OPTIONS, CONFIG))
