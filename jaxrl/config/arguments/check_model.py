"""The arguments of `jaxrl.check_model`."""

import argparse
import os
from collections.abc import Sequence

HELP = """\
python -m jaxrl.check_model MODEL: loads a model and checks what jaxrl computes with it.

MODEL is any value of config.model.path: a model folder, a GGUF file, a hub id or 'package:NAME'.
The table has its family, layers, parameters and context, and these checks:

    logits   those of transformers, if the folder has a golden.npz (scripts/make_golden.py)
    export   the exported tensors and the config.json equal those of the folder
    engine   logprobs of sampled tokens are those that training computes
    greedy   greedy tokens of the engine are the most likely ones of the forward pass

Weights are float32 in host memory, on CPU unless JAX_PLATFORMS is set: 4 bytes per parameter, and
as much disk space for the export. The exit status is 1 if a check fails.
"""


def parser() -> argparse.ArgumentParser:
    """The parser of the arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxrl.check_model",
        description=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", help="model folder, GGUF file, hub id or 'package:NAME'")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and samples (default: 0)")
    return parser


def read(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments. Exits with a message if one is invalid. JAX then runs on CPU by default."""
    args = parser().parse_args(argv)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    return args
