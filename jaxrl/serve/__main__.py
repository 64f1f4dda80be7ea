"""python -m jaxrl.serve --model=runs/quickstart: an OpenAI-compatible server for one model.

With --follow it is the policy of a run that trains: each checkpoint takes the place of the one before.
Endpoints: /v1/chat/completions, /v1/completions, /v1/models, /health, /metrics; docs/how_to/serving.md has the details.
Any key of a run can be set as well, e.g. --config.rollout.max_num_seqs=64, --config.mesh.tensor=4,
--config.rollout.kv_dtype=bfloat16, --config.data.chat_template=chatml; --config.help lists them.
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
from jaxrl.serve.checkpoint_watcher import Follower
from jaxrl.serve.checkpoints import first_step
from jaxrl.serve.engine_thread import EngineThread
from jaxrl.serve.metrics import Meters
from jaxrl.serve.model import Model, open_model
from jaxrl.serve.request import Limits
from jaxrl.trainer.setup.folder import run_in

log = logging.getLogger(__name__)
KEY_VARIABLE = "JAXRL_API_KEY"
GRACE_S = 30  # that requests under way have to end in when the server is told to stop
# Shorter dispatches than in training, as new requests wait for the end of one, and a smaller pool.
ENGINE = {"rollout.steps_per_dispatch": "8", "rollout.max_num_seqs": "16"}


def main(argv: list[str] | None = None) -> int:
    options, run = read(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(format="%(levelname)s: %(message)s")
    logging.getLogger("jaxrl.serve").setLevel(logging.INFO)
    try:
        with listener(options.host, options.port) as listening:
            web = server(open_service(options, run))
            print(f"serving {options.name} on {url(listening)}/v1; Ctrl-C ends it", flush=True)
            web.run(sockets=[listening])
    except (ValueError, OSError, CheckpointError) as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # what was under way has ended by now
        pass
    return 0


def read(argv: list[str]) -> tuple[argparse.Namespace, RunConfig]:
    """The server's own arguments, and the keys of a run. Exits with one message on anything wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxrl.serve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model", help="a Hugging Face folder, the folder of a run (its hf/ is served, else its newest checkpoint), a .gguf file, a hub id or 'package:NAME'")  # fmt: skip
    add("--follow", action="store_true", help="serve the newest checkpoint of a run, and each newer one once it is complete")  # fmt: skip
    add("--step", type=int, help="serve the checkpoint of this step of a run")
    add("--name", help="what clients call the model (default: what --model says)")
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s, this machine alone)")  # fmt: skip
    add("--port", type=int, default=8000, help="0 takes a free one (default: %(default)s)")
    add("--api-key", default=os.environ.get(KEY_VARIABLE, ""), help=f"what clients must send (default: the environment variable {KEY_VARIABLE}; none = no key is asked for)")  # fmt: skip
    add("--max-len", type=int, default=2048, help="tokens of prompt and response together, at most what the model was made for (default: %(default)s)")  # fmt: skip
    add("--max-waiting", type=int, default=64, help="responses that may wait for a place in the batch; more are answered 429 (default: %(default)s)")  # fmt: skip
    add("--timeout-s", type=float, default=600, help="seconds that an answer may take, waiting included (default: %(default)s)")  # fmt: skip
    options, rest = parser.parse_known_args(argv)
    if not options.model:
        parser.error("--model is missing; set it to a model folder or the folder of a run")
    if options.max_len < 2 or options.max_waiting < 0 or options.timeout_s <= 0:
        parser.error("--max-len must be 2 or more, --max-waiting 0 or more, --timeout-s above 0")
    if options.follow and options.step is not None:
        parser.error("--follow goes on from the newest checkpoint; leave out --step")
    try:
        config = first_config(options)
    except ValueError as problem:
        stop(str(problem))
    config, unknown = read_args(rest, config)
    if unknown:
        parser.error(f"unknown argument {unknown[0]}")
    if options.checkpoints is None:
        override(config, "model.path", options.model)
    options.name = options.name or options.model
    run, problems = build(RunConfig, config.to_dict())
    try:
        raise_errors(problems)
    except ValueError as problem:
        stop(str(problem))
    return options, run


def first_config(options: argparse.Namespace) -> ConfigDict:
    """What holds where nothing else is said. Of a run: how it writes prompts and, where its checkpoints are to be
    served (options.checkpoints, their folder, else None), the model that it began with."""
    config, folder, taken = default_config(), Path(options.model).expanduser(), dict(ENGINE)
    options.checkpoints, pinned = None, options.follow or options.step is not None
    if trained := run_in(folder):
        taken["data.chat_template"] = trained.data.chat_template
        taken["data.system_prompt"] = trained.data.system_prompt
        if pinned or not (folder / "hf").is_dir():
            options.checkpoints = folder / "checkpoints"
            taken["model.path"] = trained.model.path
            taken["critic.shared"] = str(trained.critic.shared)
    elif pinned:
        raise ValueError(
            f"--follow and --step are for the folder of a run that has begun; {folder} has no config.json with "
            "checkpoints/ beside it"
        )
    for name, text in taken.items():
        override(config, name, text)
    return config


def listener(host: str, port: int) -> socket.socket:
    """A socket bound before the model is loaded; clients are refused until the server listens."""
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as problem:
        listening.close()
        raise OSError(
            f"cannot listen on {host}, port {port} ({problem.strerror or problem}); set another --port or --host"
        ) from problem
    return listening


def url(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def open_service(options: argparse.Namespace, run: RunConfig) -> Service:
    """The model loaded and compiled, and what answers for it."""
    if not options.api_key and not is_loopback(options.host):
        log.warning(
            "%s can be reached from other machines and no API key is asked for; set --api-key or %s",
            options.host,
            KEY_VARIABLE,
        )
    model, meters = first_model(options, run), Meters()
    most_jobs = run.rollout.max_num_seqs + options.max_waiting
    limits = Limits(
        name=options.name,
        context=model.context,
        vocab=model.engine.cfg.V,
        n_stop=MAX_STOP_IDS - len(model.engine.eos_ids),
        n_choices=most_jobs,
    )
    engine = EngineThread(
        model.engine, model.params, model.mesh, meters, most_jobs=most_jobs, step=model.step
    )
    follower = None
    if options.follow and model.checkpoints is not None:
        follower = Follower(model.checkpoints, engine, meters)
    return Service(
        limits=limits,
        renderer=model.renderer,
        engine=engine,
        follower=follower,
        meters=meters,
        api_key=options.api_key,
        timeout_s=options.timeout_s,
    )


def first_model(options: argparse.Namespace, run: RunConfig) -> Model:
    """What is served first. A run that is followed may remove a checkpoint while it is read; there is a newer one then."""
    open_step = functools.partial(open_model, run, max_len=options.max_len)
    if (saved := options.checkpoints) is None:
        return open_step()
    step = first_step(saved, options.step, follow=options.follow)
    while True:
        try:
            return open_step(checkpoints=saved, step=step)
        except CheckpointError:
            failed, step = step, first_step(saved, options.step, follow=options.follow)
            if step == failed:
                raise


def server(service: Service) -> uvicorn.Server:
    return uvicorn.Server(
        uvicorn.Config(
            service.app(),
            log_level="warning",
            lifespan="on",
            timeout_graceful_shutdown=GRACE_S,
        )
    )


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


if __name__ == "__main__":
    sys.exit(main())
