"""python -m jaxrl.train --config=configs/quickstart.py: reinforcement learning.

Each step is `train_step` in trainer/step.py: sample -> reward -> experience -> update.
"""

import gc
import os
import sys

if __name__ == "__main__":  # before the imports, which take seconds
    print("jaxrl: loading", flush=True)
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # "PyTorch was not found"
    gc.disable()  # until the run is open: almost all that imports and tracing allocate is kept

from jaxrl.config.command_line import parse
from jaxrl.config.keys import RunConfig
from jaxrl.trainer.loop import exit_status, run_to_end
from jaxrl.trainer.setup.run import open_run
from jaxrl.trainer.step import train_step, validate


def main() -> int:
    """Exit status: 0 done, 1 after an error with a message, 130 interrupted and saved."""
    return exit_status(train, parse(sys.argv[1:]))


def train(cfg: RunConfig) -> bool:
    """Trains to the last step. Returns False if the run was interrupted and its state saved."""
    with open_run(cfg) as run:
        gc.enable()
        return run_to_end(run, train_step, validate)


if __name__ == "__main__":
    sys.exit(main())
