"""python -m jaxrl.reward_model --config=configs/reward_model_7b.py: reward model training."""

import sys

if __name__ == "__main__":
    from jaxrl.runtime.start import begin_loading

    begin_loading()

from jaxrl.config.command_line import parse
from jaxrl.config.keys import RunConfig
from jaxrl.trainer.loop import exit_status
from jaxrl.trainer.offline.reward_model import REWARD_MODEL
from jaxrl.trainer.setup.run import train_offline


def train(cfg: RunConfig) -> bool:
    """Trains to the last step. Returns False if the run was interrupted and its state saved."""
    return train_offline(cfg, REWARD_MODEL)


if __name__ == "__main__":
    sys.exit(exit_status(train, parse(sys.argv[1:])))
