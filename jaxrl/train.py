"""python -m jaxrl.train --config=configs/quickstart.py: reinforcement learning.

Each step is `train_step` in trainer/rl_step.py: rollout, reward, experience, score, update.
"""

import sys

from jaxrl.config.command_line import parse
from jaxrl.config.keys import RunConfig
from jaxrl.runtime.start import begin_loading, end_loading

if __name__ == "__main__":  # answers a mistyped key before the imports that take seconds
    CONFIG = parse(sys.argv[1:])
    begin_loading()

from jaxrl.rewards.worker_thread import OwnFunctions
from jaxrl.trainer.loop import exit_status, run_to_end
from jaxrl.trainer.rl_step import train_step, validate
from jaxrl.trainer.setup.opening import open_run


def train(cfg: RunConfig, own_rewards: OwnFunctions | None = None) -> bool:
    """Trains to the last step. Returns False if the run was interrupted and its state saved.

    `own_rewards` is as in `open_run`.
    """
    with open_run(cfg, own_rewards) as run:
        end_loading()
        return run_to_end(run, train_step, validate)


if __name__ == "__main__":
    sys.exit(exit_status(train, CONFIG))
