"""The arguments of `jaxrl.convert`."""

import argparse
from collections.abc import Sequence
from pathlib import Path

HELP = """\
python -m jaxrl.convert SRC DST [--dtype bfloat16]: converts any model to a Hugging Face folder.

SRC is any value of config.model.path: a model folder, a GGUF file, a hub id or 'package:NAME'.

python -m jaxrl.convert SRC DST --adapter=FOLDER merges an adapter in PEFT's format into the model.

python -m jaxrl.convert RUN --step=48 --output=DST exports a checkpoint of a run folder: an
intermediate one, the best, or the last of a run that was interrupted. Adapters are merged into
the model, or written in PEFT's format with --part=adapter. It needs one host and no accelerator,
and memory for a part of one tensor.

An image-and-text model is written with its vision tower, projector and processor files, in the
class that it has; --text-only writes its language model alone.
"""
PARTS = ("policy", "critic", "ema", "adapter")
DTYPES = ("float32", "float16", "bfloat16")


def parser() -> argparse.ArgumentParser:
    """The parser of the arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxrl.convert",
        description=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "source", help="model folder, GGUF file, hub id or 'package:NAME'; a run folder with --step"
    )
    parser.add_argument("target", type=Path, nargs="?", help="output folder")
    parser.add_argument(
        "--output", type=Path, help="output folder; a model in it is replaced (as TARGET)"
    )
    parser.add_argument("--step", help="checkpoint of a run to export: a number, best or last")
    parser.add_argument(
        "--part",
        choices=PARTS,
        default="policy",
        help="what to export: the trained model (default), the critic, the averaged weights, or "
        "the adapter in PEFT's format",
    )
    parser.add_argument(
        "--adapter", type=Path, help="folder of an adapter in PEFT's format to merge into the model"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="dtype of the weights (default: unchanged)")
    parser.add_argument(
        "--text-only",
        action="store_true",
        help="of an image-and-text model, the language model without the vision tower, in the "
        "class of a text model; an adapter has the names of that class",
    )
    parser.add_argument(
        "--max-shard-bytes", type=int, default=5_000_000_000, help="largest weight file in bytes"
    )
    return parser


def read(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments, with the output folder in `target`. Exits with a message if one is invalid."""
    args, error = parser().parse_args(argv), parser().error
    if (args.target is None) == (args.output is None):
        error("set the output folder, as TARGET or with --output")
    if args.step is None and args.part != "policy":
        error(f"--part={args.part} needs --step")
    if args.step is not None and args.adapter is not None:
        error("--adapter merges into a model folder; leave out --step")
    args.target = args.target or args.output
    return args
