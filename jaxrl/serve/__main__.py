"""python -m jaxrl.serve --model=runs/quickstart: an OpenAI-compatible server for one model.

With --follow it serves the policy of a run in training, and loads every new checkpoint.
Endpoints: /v1/chat/completions, /v1/completions, /v1/models, /health, /metrics; see
docs/how_to/serving.md. All keys of a run can be set, e.g. --config.rollout.max_num_seqs=64,
--config.mesh.tensor=4, --config.rollout.kv_dtype=bfloat16, --config.data.chat_template=chatml;
--config.help lists them.
"""

import argparse
import functools
import ipaddress
import logging
import os
import socket
import sys
from pathlib import Path

if __name__ == "__main__":  # before the imports, which take seconds
    print("jaxrl: loading", flush=True)
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # "PyTorch was not found"

try:
    import uvicorn
except ModuleNotFoundError as missing:
    raise SystemExit(
        f"error: there is no {missing.name}; pip install 'jaxrl[serve]', or uv sync --extra serve"
    ) from missing

from ml_collections import ConfigDict

from jaxrl.config.command_line import override, read_args, stop
from jaxrl.config.keys import RunConfig
from jaxrl.config.resolve import default_config, raise_errors
from jaxrl.config.schema import build
from jaxrl.engine.batches import MAX_STOP_IDS
from jaxrl.io.checkpoint.errors import CheckpointError
from jaxrl.serve.app import Service
from jaxrl.serve.checkpoint_watcher import CheckpointWatcher, first_step
from jaxrl.serve.engine_thread import EngineThread
from jaxrl.serve.metrics import ServerMetrics
from jaxrl.serve.model import Model, open_model
from jaxrl.serve.request import Limits
from jaxrl.trainer.setup.folder import read_run_config

log = logging.getLogger(__name__)
KEY_VARIABLE = "JAXRL_API_KEY"
SHUTDOWN_TIMEOUT_S = 30  # for requests in progress
# Shorter dispatches than in training, because new requests wait for the end of one; a smaller pool.
ENGINE_DEFAULTS = {"rollout.steps_per_dispatch": "8", "rollout.max_num_seqs": "16"}


def main(argv: list[str] | None = None) -> int:
    options, run = read(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(format="%(levelname)s: %(message)s")
    logging.getLogger("jaxrl.serve").setLevel(logging.INFO)
    try:
        with listener(options.host, options.port) as listening:
            web = server(open_service(options, run))
            print(f"serving {options.name} on {url(listening)}/v1; stop with Ctrl-C", flush=True)
            web.run(sockets=[listening])
    except (ValueError, OSError, CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # after the shutdown of all requests
        pass
    return 0


def read(argv: list[str]) -> tuple[argparse.Namespace, RunConfig]:
    """(the server's options, the keys of a run). Exits with one message on invalid arguments."""
    parser = arguments()
    options, rest = parser.parse_known_args(argv)
    if not options.model:
        parser.error("--model is missing; set it to a model folder or a run folder")
    if options.max_len < 2 or options.max_waiting < 0 or options.timeout_s <= 0:
        parser.error("--max-len must be 2 or more, --max-waiting 0 or more, --timeout-s above 0")
    if options.follow and options.step is not None:
        parser.error("--follow starts from the newest checkpoint; leave out --step")
    try:
        config = initial_config(options)
    except ValueError as error:
        stop(str(error))
    config, unknown = read_args(rest, config)
    if unknown:
        parser.error(f"unknown argument {unknown[0]}")
    if options.checkpoints is None:
        override(config, "model.path", options.model)
    options.name = options.name or options.model
    run, errors = build(RunConfig, config.to_dict())
    try:
        raise_errors(errors)
    except ValueError as error:
        stop(str(error))
    return options, run


def arguments() -> argparse.ArgumentParser:
    """The server's own options; the keys of a run are read separately."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxrl.serve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--model",
        help="Hugging Face folder, run folder (serves its hf/ export, else its newest checkpoint), "
        ".gguf file, hub id or 'package:NAME'",
    )
    add(
        "--follow",
        action="store_true",
        help="serve the newest checkpoint of a run, and reload when a newer one is complete",
    )
    add("--step", type=int, help="serve the checkpoint of this training step of a run")
    add("--name", help="served model name (default: the value of --model)")
    add(
        "--host",
        default="127.0.0.1",
        help="address to listen on (default: %(default)s, this machine only)",
    )
    add("--port", type=int, default=8000, help="0 picks a free one (default: %(default)s)")
    add(
        "--api-key",
        default=os.environ.get(KEY_VARIABLE, ""),
        help=f"API key that clients must send (default: environment variable {KEY_VARIABLE}; "
        "empty = no key required)",
    )
    add(
        "--max-len",
        type=int,
        default=2048,
        help="max tokens of prompt and response together, limited by the model's context "
        "(default: %(default)s)",
    )
    add(
        "--max-waiting",
        type=int,
        default=64,
        help="queued responses; beyond that, requests get 429 (default: %(default)s)",
    )
    add(
        "--timeout-s",
        type=float,
        default=600,
        help="seconds per request, including time in the queue (default: %(default)s)",
    )
    return parser


def initial_config(options: argparse.Namespace) -> ConfigDict:
    """The default config of the server, before the command line's overrides.

    For a run folder it takes the run's chat template and system prompt. If checkpoints of the run
    are to be served, it also takes the run's initial model, and sets `options.checkpoints` to their
    folder; otherwise `options.checkpoints` is None.
    """
    config, folder = default_config(), Path(options.model).expanduser()
    values = dict(ENGINE_DEFAULTS)
    options.checkpoints, needs_checkpoint = None, options.follow or options.step is not None
    if trained := read_run_config(folder):
        values["data.chat_template"] = trained.data.chat_template
        values["data.system_prompt"] = trained.data.system_prompt
        if needs_checkpoint or not (folder / "hf").is_dir():
            options.checkpoints = folder / "checkpoints"
            values["model.path"] = trained.model.path
            values["critic.shared"] = str(trained.critic.shared)
    elif needs_checkpoint:
        raise ValueError(
            f"--follow and --step need the folder of a started run; {folder} has no config.json "
            "with checkpoints/ next to it"
        )
    for name, text in values.items():
        override(config, name, text)
    return config


def listener(host: str, port: int) -> socket.socket:
    """A socket, bound before the model is loaded; it refuses clients until the server listens."""
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        raise OSError(
            f"cannot listen on {host}, port {port} ({error.strerror or error}); set another --port "
            "or --host"
        ) from error
    return listening


def url(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def open_service(options: argparse.Namespace, run: RunConfig) -> Service:
    """Loads and compiles the model, and creates the service for it."""
    if not options.api_key and not is_loopback(options.host):
        log.warning(
            "%s is reachable from other machines without an API key; set --api-key or %s",
            options.host,
            KEY_VARIABLE,
        )
    model, metrics = load_first_model(options, run), ServerMetrics()
    max_tasks = run.rollout.max_num_seqs + options.max_waiting
    limits = Limits(
        model_name=options.name,
        max_model_len=model.max_model_len,
        vocab=model.engine.cfg.V,
        n_stop_ids=MAX_STOP_IDS - len(model.engine.eos_ids),
        n_choices=max_tasks,
    )
    engine = EngineThread(
        model.engine, model.params, model.mesh, metrics, max_tasks=max_tasks, step=model.step
    )
    watcher = None
    if options.follow and model.checkpoints is not None:
        watcher = CheckpointWatcher(model.checkpoints, engine, metrics)
    return Service(
        limits=limits,
        renderer=model.renderer,
        engine=engine,
        watcher=watcher,
        metrics=metrics,
        api_key=options.api_key,
        timeout_s=options.timeout_s,
    )


def load_first_model(options: argparse.Namespace, run: RunConfig) -> Model:
    """The model to serve first.

    A run in training may delete a checkpoint during loading; this then loads a newer one.
    """
    open_step = functools.partial(open_model, run, max_len=options.max_len)
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


def server(service: Service) -> uvicorn.Server:
    return uvicorn.Server(
        uvicorn.Config(
            service.app(),
            log_level="warning",
            lifespan="on",
            timeout_graceful_shutdown=SHUTDOWN_TIMEOUT_S,
        )
    )


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


if __name__ == "__main__":
    sys.exit(main())
