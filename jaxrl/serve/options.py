"""The server's command line: its own options, and the keys of a run."""

import argparse
import os
from pathlib import Path

from ml_collections import ConfigDict

from jaxrl.config.checks.data import data_errors
from jaxrl.config.command_line import override, read_args, stop
from jaxrl.config.keys import RunConfig
from jaxrl.config.resolve import default_config, raise_errors
from jaxrl.config.saved import read_run_config
from jaxrl.config.schema import build, to_dict
from jaxrl.serve.command_line import add_address, add_limits, parse_own, server_parser
from jaxrl.tool_calls.formats import FORMATS

DESCRIPTION = """Serve one model over an OpenAI-compatible HTTP API.

Endpoints: /v1/chat/completions, /v1/completions, /v1/models, /health, /metrics; see
docs/how_to/serving.md. All keys of a run can be set, e.g. --config.rollout.max_num_seqs=64,
--config.mesh.tensor=4, --config.rollout.kv_dtype=bfloat16, --config.data.chat_template=chatml;
--config.help lists them.
"""
KEY_VARIABLE = "JAXRL_API_KEY"
# Shorter dispatches than in training, because new requests wait for the end of one; a smaller pool.
ENGINE_DEFAULTS = {"rollout.steps_per_dispatch": "8", "rollout.max_num_seqs": "16"}
LIMITS = {  # option: (default, smallest value, help)
    "max-len": (
        2048,
        2,
        "max tokens of prompt and response together, limited by the model's context",
    ),
    "max-waiting": (64, 0, "queued responses; beyond that, requests get 429"),
    "timeout-s": (600.0, 0.001, "seconds per request, including time in the queue"),
    "max-connections": (
        512,
        1,
        "open connections; beyond that, the one that has waited longest for a request is closed",
    ),
    "max-body-mib": (8, 1, "MiB of a request's body; beyond that, it gets 413"),
    "max-bodies-mib": (
        64,
        1,
        "MiB of all bodies above 64 KiB that are being read or parsed; beyond that, 429",
    ),
    "max-parsing": (2, 1, "requests that are parsed and tokenized at one time; others wait"),
    "read-timeout-s": (30.0, 0.001, "seconds in which a client must send a complete request"),
    "write-timeout-s": (30.0, 0.001, "seconds for which a client may leave a response unread"),
}


def read(argv: list[str]) -> tuple[argparse.Namespace, RunConfig]:
    """(the server's options, the keys of a run). Exits with one message on invalid arguments."""
    parser = arguments()
    options, rest = parse_own(parser, argv, LIMITS, "a model folder or a run folder")
    if options.max_bodies_mib < options.max_body_mib:
        parser.error("--max-bodies-mib must be at least --max-body-mib")
    if options.api_key and options.no_api_key:
        parser.error("--no-api-key contradicts the API key that is set")
    if options.follow and options.step is not None:
        parser.error("--follow starts from the newest checkpoint; leave out --step")
    adapters = read_adapters(options.adapter, parser)
    try:
        config = initial_config(options)
    except ValueError as error:
        stop(str(error))
    config, unknown = read_args(rest, config)
    if unknown:
        parser.error(f"unknown argument {unknown[0]}")
    if options.checkpoints is None:
        override(config, "model.path", options.model)
    options.name, options.adapters = options.name or default_name(options.model), adapters
    if options.name in adapters:
        parser.error(f"--adapter={options.name}=... has the name of the base model; set --name")
    if adapters and options.checkpoints is not None:
        parser.error(
            "--adapter needs a model folder as --model; a checkpoint of a run is served without "
            "--adapter"
        )
    run, errors = build(RunConfig, config.to_dict())
    try:
        raise_errors([*errors, *data_errors(run.data)])
    except ValueError as error:
        stop(str(error))
    return options, run


def read_adapters(values: list[str], parser: argparse.ArgumentParser) -> dict[str, Path]:
    """The folders of the adapters by their model names. Exits with a message if one is invalid.

    A run folder stands for the adapter that it exported.
    """
    adapters: dict[str, Path] = {}
    for value in values:
        name, _, path = value.partition("=")
        if not (name and path):
            parser.error(f"--adapter={value} must be NAME=PATH")
        if name in adapters:
            parser.error(f"--adapter={value}: there are two adapters of the name {name}")
        folder = Path(path).expanduser()
        adapters[name] = folder / "adapter" if (folder / "adapter").is_dir() else folder
    return adapters


def default_name(model: str) -> str:
    """The last part of a local path, else the model as it was given, such as a hub id."""
    local = Path(model).expanduser()
    return local.resolve().name if local.exists() else model


def arguments() -> argparse.ArgumentParser:
    """The server's own options; the keys of a run are read separately."""
    parser = server_parser("python -m jaxrl.serve", DESCRIPTION)
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
    add(
        "--step", help="serve the checkpoint of this training step of a run: a number, best or last"
    )
    add(
        "--adapter",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="also serve a low-rank adapter of the model, in PEFT's format, as the model NAME; may "
        "be repeated. PATH is its folder, or that of a run that trained it",
    )
    add(
        "--name",
        help="served model name (default: the name of the folder or file of --model, or the hub "
        "id)",
    )
    add_address(parser, 8000)
    add(
        "--api-key",
        default=os.environ.get(KEY_VARIABLE, ""),
        help=f"API key that clients must send (default: environment variable {KEY_VARIABLE}; "
        "empty = no key required)",
    )
    add("--no-api-key", action="store_true", help="allow other machines without an API key")
    add(
        "--tool-format",
        default="auto",
        choices=("auto", *FORMATS),
        help="format of the model's tool calls (default: the chat template's)",
    )
    add_limits(parser, LIMITS)
    return parser


def check_tower(folder: Path, trained: RunConfig) -> None:
    """Raises ValueError for checkpoints with a vision tower, which would serve the initial one."""
    if trained.model.freeze_vision != "all":
        raise ValueError(
            f"{folder} trains the vision tower or its projector (model.freeze_vision="
            f"{trained.model.freeze_vision!r}), and the server reads only the language model of a "
            f"checkpoint; write python -m jaxrl.convert {folder} --step=last --output=DIR and "
            "serve DIR"
        )


def initial_config(options: argparse.Namespace) -> ConfigDict:
    """The default config of the server, before the command line's overrides.

    For a run folder it takes the run's chat template with its arguments, and its system prompt. If
    checkpoints of the run are to be served, it also takes the run's initial model, and sets
    `options.checkpoints` to their folder; otherwise `options.checkpoints` is None.
    """
    config, folder = default_config(), Path(options.model).expanduser()
    values = dict(ENGINE_DEFAULTS)
    options.checkpoints, needs_checkpoint = None, options.follow or options.step is not None
    if trained := read_run_config(folder):
        values["data.chat_template"] = trained.data.chat_template
        values["data.system_prompt"] = trained.data.system_prompt
        values["data.template_kwargs"] = str(trained.data.template_kwargs)
        values["data.images"] = str(trained.data.images)
        values["data.image_kwargs"] = str(trained.data.image_kwargs)
        if needs_checkpoint or not (folder / "hf").is_dir():
            check_tower(folder, trained)
            # The server reads base and adapters, so that a new checkpoint replaces only adapters.
            config.update({"lora": to_dict(trained.lora) | {"merge": False}})
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
