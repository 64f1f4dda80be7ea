"""python -m jaxrl.convert SRC DST [--dtype bfloat16]: converts any model to a Hugging Face folder.

SRC is any value of config.model.path: a model folder, a GGUF file, a hub id or 'package:NAME'.

python -m jaxrl.convert SRC DST --adapter=FOLDER merges an adapter in PEFT's format into the model.

python -m jaxrl.convert RUN --step=48 --output=DST exports a checkpoint of a run folder: an
intermediate one, the best, or the last of a run that was interrupted. Adapters are merged into
the model, or written in PEFT's format with --part=adapter. It needs one host and no accelerator,
and memory for a part of one tensor.
"""

import argparse
from pathlib import Path

if __name__ == "__main__":
    from jaxrl.ending import end_on_signals

    end_on_signals()

import ml_dtypes
import numpy as np

from jaxrl.checkpoint.errors import CheckpointError
from jaxrl.models.config import DecoderConfig
from jaxrl.models.decoder import decoder_specs
from jaxrl.models.files.adapter import check_base_copies, open_adapter, warn_of_other_base
from jaxrl.models.files.hf_config import folder_config
from jaxrl.models.files.hf_save import SHARD_BYTES, convert_model
from jaxrl.models.files.source import resolve_model
from jaxrl.models.files.weight_files import find_tensors
from jaxrl.models.lora import split
from jaxrl.models.spec import count_params
from jaxrl.trainer.export import PARTS, export_checkpoint

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m jaxrl.convert",
        description=__doc__,
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
        "--max-shard-bytes", type=int, default=SHARD_BYTES, help="largest weight file in bytes"
    )
    args = parser.parse_args(argv)
    if (args.target is None) == (args.output is None):
        parser.error("set the output folder, as TARGET or with --output")
    if args.step is None and args.part != "policy":
        parser.error(f"--part={args.part} needs --step")
    if args.step is not None and args.adapter is not None:
        parser.error("--adapter merges into a model folder; leave out --step")
    try:
        cfg, what = convert(args, args.target or args.output)
    except (ValueError, OSError, CheckpointError) as error:
        parser.exit(1, f"error: {error}\n")
    n_params = count_params(split(decoder_specs(cfg))[0])  # of an adapter: its own
    print(
        f"{args.target or args.output}: {what}{cfg.family}, {cfg.L} layers, {n_params:,} parameters"
    )


def convert(args: argparse.Namespace, target: Path) -> tuple[DecoderConfig, str]:
    """The model that was written, and what it is of a run."""
    dtype = args.dtype and DTYPES[args.dtype]
    if args.step is None:
        source = resolve_model(args.source)
        adapter = args.adapter and open_adapter(args.adapter, folder_config(source))
        if adapter:
            check_base_copies(args.adapter, find_tensors(source))
            warn_of_other_base(args.adapter, f"{args.source} ({source})")
        limit = args.max_shard_bytes
        cfg = convert_model(source, target, dtype=dtype, max_shard_bytes=limit, adapter=adapter)
        return cfg, "" if adapter is None else f"{args.adapter} merged, "
    step, cfg = export_checkpoint(
        Path(args.source),
        args.step,
        target,
        part=args.part,
        dtype=dtype,
        max_shard_bytes=args.max_shard_bytes,
    )
    return cfg, f"{args.part} of step {step}, "


if __name__ == "__main__":
    main()
