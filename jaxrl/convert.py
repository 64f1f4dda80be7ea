"""python -m jaxrl.convert SRC DST: converts a model or a checkpoint to a Hugging Face folder."""

import argparse
import sys
from pathlib import Path

from jaxrl.config.arguments.convert import read
from jaxrl.runtime.start import begin_program

if __name__ == "__main__":  # answers a mistyped argument before the imports that take seconds
    ARGUMENTS = read(sys.argv[1:])
    begin_program()

import ml_dtypes  # noqa: F401, numpy's bfloat16
import numpy as np

from jaxrl.checkpoint.errors import CheckpointError
from jaxrl.models.config import DecoderConfig
from jaxrl.models.decoder import decoder_specs
from jaxrl.models.files.adapter import (
    check_base_copies,
    open_adapter,
    warn_of_other_base,
    with_adapted_tower,
)
from jaxrl.models.files.hf_config import folder_config
from jaxrl.models.files.hf_save import SaveSettings, convert_model
from jaxrl.models.files.quantized.scheme import folder_scheme
from jaxrl.models.files.source import resolve_model
from jaxrl.models.files.weight_files import find_tensors
from jaxrl.models.lora import split
from jaxrl.models.spec import count_params
from jaxrl.trainer.export import export_checkpoint


def main(args: argparse.Namespace) -> None:
    """Converts; exits with a message and status 1 if that is not possible."""
    try:
        cfg, what = convert(args)
    except (ValueError, OSError, CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    n_params = count_params(split(decoder_specs(cfg))[0])  # of an adapter: its own
    print(f"{args.target}: {what}{cfg.family}, {cfg.L} layers, {n_params:,} parameters")


def convert(args: argparse.Namespace) -> tuple[DecoderConfig, str]:
    """The model that was written, and what it is of a run."""
    dtype = args.dtype and np.dtype(args.dtype)
    if args.step is None:
        source = resolve_model(args.source)
        adapter = None
        if args.adapter:
            decoder = with_adapted_tower(args.adapter, folder_config(source), source)
            adapter = open_adapter(args.adapter, decoder)
            check_base_copies(args.adapter, find_tensors(source))
            warn_of_other_base(args.adapter, f"{args.source} ({source})")
        cfg = convert_model(
            source,
            args.target,
            dtype=dtype,
            max_shard_bytes=args.max_shard_bytes,
            adapter=adapter,
            settings=SaveSettings(text_only=args.text_only),
        )
        what = "" if adapter is None else f"{args.adapter} merged, "
        scheme = folder_scheme(source)
        return cfg, what if scheme is None else f"{scheme.title} dequantized, {what}"
    step, cfg = export_checkpoint(
        Path(args.source),
        args.step,
        args.target,
        part=args.part,
        dtype=dtype,
        max_shard_bytes=args.max_shard_bytes,
        text_only=args.text_only,
    )
    return cfg, f"{args.part} of step {step}, "


if __name__ == "__main__":
    main(ARGUMENTS)
