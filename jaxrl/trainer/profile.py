"""Traces of single steps, for Perfetto and XProf."""

import contextlib
from collections.abc import Iterator

import jax

from jaxrl.tracking.logger import warn
from jaxrl.trainer.core import Core
from sharding import hosts


@contextlib.contextmanager
def traced_step(core: Core) -> Iterator[None]:
    """Writes a trace of the block to run_dir/profile/step_<n> if profile.steps has the step.

    Every process writes the trace of its devices. The phases of the step are ranges in the row of
    the Python thread, named as in the report's chart of times. A trace that cannot be written is
    reported and does not stop the run.
    """
    step = core.clock.step + 1
    if step not in core.cfg.profile.steps:
        yield
        return
    folder = core.cfg.run_path / "profile" / f"step_{step}"
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # events of Python functions would fill the trace
    perfetto = hosts.is_main_process()
    jax.profiler.start_trace(folder, create_perfetto_trace=perfetto, profiler_options=options)
    try:
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            yield
    finally:
        stop_trace(core, step)


def stop_trace(core: Core, step: int) -> None:
    """Writes the trace and prints where it is."""
    folder = core.cfg.run_path / "profile" / f"step_{step}"
    try:
        with core.session.progress.waiting(f"writing the trace of step {step} to {folder}"):
            jax.profiler.stop_trace()
    except (OSError, RuntimeError) as error:
        warn(f"the trace of step {step} could not be written to {folder}", error)
