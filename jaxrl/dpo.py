"""python -m jaxrl.dpo --config=configs/dpo_7b.py: DPO, SimPO, KTO and others."""

import sys

from jaxrl.config.command_line import parse
from jaxrl.config.keys import RunConfig
from jaxrl.runtime.start import begin_loading

if __name__ == "__main__":  # answers a mistyped key before the imports that take seconds
    CONFIG = parse(sys.argv[1:])
    begin_loading()

from jaxrl.trainer.loop import exit_status
from jaxrl.trainer.offline.dpo import DPO
from jaxrl.trainer.setup.opening import train_offline


def train(cfg: RunConfig) -> bool:
    """Trains to the last step. Returns False if the run was interrupted and its state saved."""
    return train_offline(cfg, DPO)


if __name__ == "__main__":
    sys.exit(exit_status(train, CONFIG))
