"""python -m jaxrl.train --config=configs/quickstart.py: sample, reward, update, on one page."""

import os
import sys

if __name__ == "__main__":  # before the imports, which take seconds
    print("jaxrl: loading", flush=True)
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # "PyTorch was not found"

from jaxrl.config import RunConfig
from jaxrl.flags import parse
from jaxrl.io.checkpoint import CheckpointError
from jaxrl.trainer.compiles import RecompileError
from jaxrl.trainer.failure import NonFiniteError
from jaxrl.trainer.finish import finish, save, stopped
from jaxrl.trainer.interrupt import Interrupted
from jaxrl.trainer.phases import train_step, validate
from jaxrl.trainer.processes import explain
from jaxrl.trainer.setup import open_run
from sharding import hosts

EXPLAINED = (ValueError, OSError, CheckpointError, RecompileError, NonFiniteError)


def main() -> int:
    """Exit status: 0 done, 1 stopped by a mistake that the message explains, 130 interrupted and saved."""
    cfg = parse(sys.argv[1:])
    try:
        done = train(cfg)
    except EXPLAINED as problem:
        explain(problem)
        return 1
    hosts.barrier()
    return 0 if done else 130


def train(cfg: RunConfig) -> bool:
    """Runs to the last step. False if it was interrupted before that: then all is saved."""
    with open_run(cfg) as run:
        try:
            while True:
                if run.validation_due:
                    validate(run)
                if run.save_due:
                    save(run)
                if run.done:
                    break
                train_step(run)  # sample -> reward -> experience -> update
        except Interrupted as signal:
            save(run)
            stopped(run, signal)
            return False
        except NonFiniteError:
            if run.whole:
                save(run)
            raise
        finish(run)
        return True


if __name__ == "__main__":
    sys.exit(main())
