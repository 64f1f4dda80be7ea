"""The main loop of every training program, and its exit status."""

from collections.abc import Callable

from jaxrl.checkpoint.errors import CheckpointError
from jaxrl.config.keys import RunConfig
from jaxrl.runtime.compilation import RecompileError
from jaxrl.runtime.multihost import print_error
from jaxrl.runtime.signals import Interrupted, stop_on_signals
from jaxrl.trainer.checkpointing import finish, report_saved, save, save_after_error
from jaxrl.trainer.core import HasCore
from jaxrl.trainer.memory import OutOfMemoryError
from jaxrl.trainer.phases.update import NonFiniteError
from jaxrl.trainer.profile import traced_step
from sharding import hosts

USER_ERRORS = (
    ValueError,
    OSError,
    CheckpointError,
    RecompileError,
    NonFiniteError,
    OutOfMemoryError,
)


def run_to_end[R: HasCore](
    run: R, train_step: Callable[[R], None], validate: Callable[[R], None]
) -> bool:
    """Runs all remaining steps. Returns False if the run was interrupted and its state saved.

    If a step or a validation raises, the last complete step is saved before the error leaves here.
    """
    with stop_on_signals(run.core.session.stop):
        try:
            run_steps(run, train_step, validate)
        except Interrupted as signal:
            save(run.core)
            report_saved(run.core, str(signal))
            return False
        except Exception as error:
            save_after_error(run.core, error)
            raise
        finish(run.core)
    return True


def run_steps[R: HasCore](
    run: R, train_step: Callable[[R], None], validate: Callable[[R], None]
) -> None:
    """Runs all remaining steps, with the validations and checkpoints that are due."""
    core = run.core
    while True:
        if core.clock.validation_due:
            validate(run)
        if core.clock.save_due:
            save(core)
        if core.clock.done:
            break
        with traced_step(core):
            train_step(run)


def exit_status(train: Callable[[RunConfig], bool], cfg: RunConfig) -> int:
    """Runs a program. Returns 0 if done, 1 after an error with a message, 130 if interrupted."""
    try:
        done = train(cfg)
    except USER_ERRORS as error:
        print_error(error)
        if not isinstance(error, hosts.AgreedError):
            hosts.exit_immediately(1)  # other processes may be waiting for this one
        return 1
    hosts.barrier()
    return 0 if done else 130
