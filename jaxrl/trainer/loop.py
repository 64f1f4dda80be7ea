"""A job from its first step to its last, or to an interruption that loses nothing."""

from collections.abc import Callable

from jaxrl.config.keys import RunConfig
from jaxrl.io.checkpoint.errors import CheckpointError
from jaxrl.runtime.compile_watch import RecompileError
from jaxrl.runtime.multihost import print_error
from jaxrl.runtime.signals import Interrupted
from jaxrl.trainer.checkpointing import finish, save, stopped
from jaxrl.trainer.run import Job
from jaxrl.trainer.update import NonFiniteError
from sharding import hosts

EXPLAINED = (ValueError, OSError, CheckpointError, RecompileError, NonFiniteError)


def run_to_end[J: Job](
    run: J, train_step: Callable[[J], None], validate: Callable[[J], None]
) -> bool:
    """False if it was interrupted before the last step: then all is saved."""
    try:
        while True:
            if run.validation_due:
                validate(run)
            if run.save_due:
                save(run)
            if run.done:
                break
            train_step(run)
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


def exit_status(train: Callable[[RunConfig], bool], cfg: RunConfig) -> int:
    """Of the program: 0 done, 1 stopped by a mistake that the message explains, 130 interrupted and saved."""
    try:
        done = train(cfg)
    except EXPLAINED as problem:
        print_error(problem)
        return 1
    hosts.barrier()
    return 0 if done else 130
