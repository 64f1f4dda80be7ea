"""The training server's command line: its own options, and the keys of a run."""

import argparse
import os
from pathlib import Path

from jaxrl.config.checks.data import data_errors
from jaxrl.config.command_line import override, read_args, stop
from jaxrl.config.keys import RunConfig
from jaxrl.config.resolve import default_config, raise_errors
from jaxrl.config.schema import build
from jaxrl.serve.command_line import add_address, add_limits, parse_own, server_parser

DESCRIPTION = """Serve the training API of the package `tinker`: clients train low-rank adapters of
one model, and sample from them.

Clients: tinker.ServiceClient(base_url="http://127.0.0.1:8001", api_key="tml-..."); see
docs/how_to/training_api.md. All keys of a run can be set, e.g. --config.learner.token_budget=4096,
--config.rollout.max_num_seqs=64, --config.mesh.tensor=4; --config.help lists them.
"""
KEYS_VARIABLE = "JAXRL_API_KEYS"
SEGMENT = 64  # tokens; rows are multiples of learner.segment_align
# As the server of OpenAI's API; training needs the memory that the KV pool leaves.
DEFAULTS = {
    "rollout.steps_per_dispatch": "8",
    "rollout.max_num_seqs": "16",
    "rollout.memory_utilization": "0.5",
    "learner.halvings": "5",  # row lengths down to 1/32 of the token budget, for short sequences
}
LIMITS = {  # option: (default, smallest value, help)
    "max-len": (
        2048,
        2,
        "max tokens of a training sequence, and of prompt and response together, limited by the "
        "model's context",
    ),
    "max-rank": (32, 1, "max rank of an adapter"),
    "max-models": (16, 1, "adapters in training; beyond that, clients get an error"),
    "slots": (8, 1, "saved weights that the engine samples from at one time; others wait"),
    "max-waiting": (4096, 1, "sequences that are sampled or queued; beyond that, requests get 429"),
    "max-queued": (64, 1, "queued training requests of a client; beyond that, they get 429"),
    "lost-after-s": (
        600.0,
        1.0,
        "seconds without a sign of life after which a client's models make room for others",
    ),
    "timeout-s": (3600.0, 1.0, "seconds that sampling of one request may take, with its queue"),
    "max-connections": (512, 1, "open connections"),
    "max-body-mib": (64, 1, "MiB of a request's body; beyond that, it gets 413"),
    "read-timeout-s": (60.0, 0.001, "seconds in which a client must send a complete request"),
    "write-timeout-s": (60.0, 0.001, "seconds for which a client may leave a response unread"),
}


def read(argv: list[str]) -> tuple[argparse.Namespace, RunConfig]:
    """(the server's options, the keys of a run). Exits with one message on invalid arguments."""
    parser = arguments()
    options, rest = parse_own(parser, argv, LIMITS, "a model folder or a hub id")
    config = default_config()
    for name, text in DEFAULTS.items():
        override(config, name, text)
    override(config, "learner.token_budget", str(-(-options.max_len // SEGMENT) * SEGMENT))
    config, unknown = read_args(rest, config)
    if unknown:
        parser.error(f"unknown argument {unknown[0]}")
    override(config, "model.path", options.model)
    options.name = options.name or options.model
    if options.full:  # the engine and the trainer have one set of weights
        for name in ("max-models", "slots"):
            if (value := getattr(options, name.replace("-", "_"))) not in (1, LIMITS[name][0]):
                parser.error(f"--{name}={value}: --full trains one model; leave it out")
        options.slots = options.max_models = 1
    run, errors = build(RunConfig, config.to_dict())
    try:
        options.keys = read_keys(options.keys)
        raise_errors([*errors, *data_errors(run.data), *run_errors(run, options)])
    except (ValueError, OSError) as error:
        stop(str(error))
    return options, run


def read_keys(path: str) -> frozenset[str]:
    """The keys in a file, one a line; none without a path. Raises ValueError for another form."""
    if not path:
        return frozenset()
    keys = frozenset(Path(path).expanduser().read_text().split())
    if not keys or not all(key.startswith("tml-") for key in keys):
        raise ValueError(
            f"{path} must have one API key a line, each with the prefix tml-, which the package "
            "tinker requires"
        )
    return keys


def run_errors(run: RunConfig, options: argparse.Namespace) -> list[str]:
    """Errors for keys that clients choose, and for layouts that training here does not have."""
    errors, full = [], options.full
    if options.train_vision and (full or not run.data.images):
        errors.append(
            f"--train-vision with --full={full} and --config.data.images={run.data.images}: it "
            "trains adapters on images; leave out --full, and set --config.data.images=True"
        )
    dtypes = run.lora.base_dtype, run.rollout.dtype
    if full and dtypes != ("auto", "auto"):
        errors.append(
            "--config.lora.base_dtype={!r} and --config.rollout.dtype={!r}: --full trains all "
            "weights, which are not quantized; leave them out".format(*dtypes)
        )
    if run.lora.rank:
        errors.append("--config.lora.rank: clients choose their adapters; leave it out")
    if run.mesh.sequence != 1 or run.mesh.stage != 1:
        errors.append(
            "--config.mesh.sequence and .stage are not supported by this server; set them to 1"
        )
    if run.rollout.sampling.temperature != 1.0:
        errors.append(
            "--config.rollout.sampling.temperature: clients set that of their samples, and losses "
            "are at 1; leave it out"
        )
    return errors


def arguments() -> argparse.ArgumentParser:
    """The server's own options; the keys of a run are read separately."""
    parser = server_parser("python -m jaxrl.api", DESCRIPTION)
    add = parser.add_argument
    add("--model", help="Hugging Face folder, .gguf file, hub id or 'package:NAME'")
    add(
        "--name",
        help="name of the model for clients, which load its tokenizer by it (default: --model)",
    )
    add(
        "--run-dir",
        default="runs/api",
        help="folder of the server's state: sessions, results, saved adapters (default: "
        "%(default)s)",
    )
    add(
        "--full",
        action="store_true",
        help="train all weights of the model, for one client at a time, in place of adapters",
    )
    add(
        "--train-vision",
        action="store_true",
        help="adapters also change the vision tower and its projector; needs "
        "--config.data.images=True",
    )
    add_address(parser, 8001)
    add(
        "--keys",
        default=os.environ.get(KEYS_VARIABLE, ""),
        help="file with the accepted API keys, one a line; each is a client with models, samples "
        f"and checkpoints that others cannot see (default: environment variable {KEYS_VARIABLE}; "
        "without one every key is accepted, from this machine only)",
    )
    add_limits(parser, LIMITS)
    return parser
