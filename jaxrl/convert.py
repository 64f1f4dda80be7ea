"""python -m jaxrl.convert SRC DST [--dtype bfloat16]: converts any model to a Hugging Face folder.

SRC is any value of config.model.path: a model folder, a GGUF file, a hub id or 'package:NAME'.
"""

import argparse
from pathlib import Path

import ml_dtypes
import numpy as np

from jaxrl.models.decoder import decoder_specs
from jaxrl.models.files.hf_save import SHARD_BYTES, convert_model
from jaxrl.models.files.source import resolve_model
from jaxrl.models.spec import count_params

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m jaxrl.convert", description=__doc__)
    parser.add_argument("source", help="model folder, GGUF file, hub id or 'package:NAME'")
    parser.add_argument("target", type=Path, help="output folder; a model in it is replaced")
    parser.add_argument("--dtype", choices=DTYPES, help="dtype of the weights (default: unchanged)")
    parser.add_argument(
        "--max-shard-bytes", type=int, default=SHARD_BYTES, help="largest weight file in bytes"
    )
    args = parser.parse_args(argv)
    try:
        cfg = convert_model(
            resolve_model(args.source),
            args.target,
            dtype=args.dtype and DTYPES[args.dtype],
            max_shard_bytes=args.max_shard_bytes,
        )
    except (ValueError, OSError) as error:
        parser.exit(1, f"{error}\n")
    n_params = count_params(decoder_specs(cfg))
    print(f"{args.target}: {cfg.family}, {cfg.L} layers, {n_params:,} parameters")


if __name__ == "__main__":
    main()
