"""Training as `python -m jaxrl.train` does it, in the process of the caller."""

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from jaxrl.config.command_line import config_of
from jaxrl.config.keys import RunConfig
from jaxrl.config.resolve import resolve
from jaxrl.notebook.run_folder import RunFolder
from jaxrl.rewards.worker_thread import OwnFunctions, named
from jaxrl.tracking.notebook import plain_console
from jaxrl.train import train as run_program

OwnRewards = Callable[..., Any] | list[Callable[..., Any]] | tuple[Callable[..., Any], ...]


def train(
    config: str | Path | ConfigDict | RunConfig,
    *,
    overrides: Mapping[str, Any] | None = None,
    reward: OwnRewards | None = None,
) -> RunFolder:
    """Trains to the last step, or resumes the run in the config's run folder.

    An interrupt (SIGINT) saves the state and returns; the same call resumes. A second one raises
    KeyboardInterrupt at once, as an interrupt before the first step does.

    Args:
      config: a config file, the name of one in configs/ ("quickstart"), or an edited ConfigDict.
      overrides: {dotted key: value or text}, as the command line's --config.KEY=VALUE.
      reward: functions in place of config.reward.functions, in the signatures of
        docs/how_to/rewards.md. They run in reward.workers threads of this process.

    Raises:
      ValueError, OSError: the config, the models, the data, the folder or a reward is invalid.
      CheckpointError, RecompileError, NonFiniteError, OutOfMemoryError: as the program ends with.
    """
    keys, own = with_own_rewards(overrides or {}, reward)
    cfg = resolve(config_of(config, keys))
    with in_this_process():
        completed = run_program(cfg, own)
    return RunFolder(cfg.run_path, interrupted=not completed)


def with_own_rewards(
    overrides: Mapping[str, Any], reward: OwnRewards | None
) -> tuple[dict[str, Any], OwnFunctions | None]:
    """The overrides with the names of the caller's reward functions, and these functions."""
    if reward is None:
        return dict(overrides), None
    if "reward.functions" in overrides:
        raise ValueError(
            "reward= and overrides['reward.functions'] both set the reward functions; leave out "
            "one of them"
        )
    own = named(reward)
    return {**overrides, "reward.functions": tuple(own)}, own


@contextlib.contextmanager
def in_this_process() -> Iterator[None]:
    """A block that opens devices: plain output, and at its end their memory is free again.

    Raises ValueError outside of the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        raise ValueError(
            "this runs in the main thread only, where an interrupt can stop it; call it from a "
            "cell, or start `python -m jaxrl.train` as a process"
        )
    with plain_console():
        try:
            yield
        finally:
            gc.collect()  # of cycles that hold weights
