"""python -m jaxrl.reward_model --config=configs/reward_model_7b.py: reward model training."""

import sys

from jaxrl.config.command_line import parse
from jaxrl.config.keys import RunConfig
from jaxrl.runtime.start import begin_loading

if __name__ == "__main__":  # answers a mistyped key before the imports that take seconds
    CONFIG = parse(sys.argv[1:])
    begin_loading()

from jaxrl.trainer.loop import exit_status
from jaxrl.trainer.offline.reward_model import score_objective
from jaxrl.trainer.setup.opening import train_offline


def train(cfg: RunConfig) -> bool:
    """Trains to the last step. Returns False if the run was interrupted and its state saved."""
    return train_offline(cfg, score_objective(cfg))


if __name__ == "__main__":
    sys.exit(exit_status(train, CONFIG))
