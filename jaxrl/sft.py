"""python -m jaxrl.sft --config=configs/sft_gsm8k.py: supervised fine-tuning on conversations."""

import sys

from jaxrl.config.command_line import parse
from jaxrl.config.keys import RunConfig
from jaxrl.runtime.start import begin_loading

if __name__ == "__main__":  # answers a mistyped key before the imports that take seconds
    CONFIG = parse(sys.argv[1:])
    begin_loading()

from jaxrl.trainer.loop import exit_status
from jaxrl.trainer.offline.sft import SFT
from jaxrl.trainer.setup.opening import train_offline


def train(cfg: RunConfig) -> bool:
    """Trains to the last step. Returns False if the run was interrupted and its state saved."""
    return train_offline(cfg, SFT)


if __name__ == "__main__":
    sys.exit(exit_status(train, CONFIG))
