"""Stage one of opening a run: the process group, the lock of its folder, and progress output."""

import contextlib
import dataclasses
from types import ModuleType

from jaxrl.algorithms.user_rows import check_user_rows
from jaxrl.config.keys import RunConfig
from jaxrl.runtime.compilation import CompileWatch, open_cache
from jaxrl.runtime.folder_lock import FolderLock
from jaxrl.runtime.multihost import join
from jaxrl.runtime.ray_cluster import connect, import_ray
from jaxrl.runtime.signals import StopFlag
from jaxrl.tracking.loggers import check_loggers
from jaxrl.tracking.progress import Progress
from jaxrl.trainer.setup.folder import hold_folder, open_folder
from sharding import hosts


@dataclasses.dataclass(frozen=True)
class Session:
    """The process-wide services of a run."""

    cfg: RunConfig  # with data.today set
    stack: contextlib.ExitStack  # ends what this and later stages open, in reverse order
    stop: StopFlag
    progress: Progress
    watch: CompileWatch
    lock: FolderLock | None  # on the run folder; None except in the main process
    ray: ModuleType | None  # connected to its cluster; None without rollout workers


def open_session(cfg: RunConfig, stack: contextlib.ExitStack) -> Session:
    """Joins the process group, locks the run folder and checks the config against both."""
    cache_problem = open_cache(cfg.compilation_cache)
    join(cfg)
    with hosts.raise_together():
        check_loggers(cfg.log)
    progress = stack.enter_context(Progress())
    lock = stack.enter_context(hold_folder(cfg, progress))
    watch = CompileWatch(progress.compiled)
    stack.callback(watch.detach)
    progress.status(f"run folder {cfg.run_path}")
    if cache_problem:
        progress.status(f"warning: {cache_problem}")
    check_processes(cfg)
    check_user_rows(cfg)
    with hosts.raise_together():
        ray = connect_to_workers(cfg)
    with hosts.main_process_first():
        cfg = open_folder(cfg)
    return Session(cfg, stack, StopFlag(), progress, watch, lock, ray)


def check_processes(cfg: RunConfig) -> None:
    """Raises AgreedError if the schedule does not support the processes of the run."""
    n = hosts.n_processes()
    if cfg.schedule.mode != "sync" and n > 1 and (errors := _process_errors(cfg, n)):
        raise hosts.AgreedError("\n".join(errors))


def _process_errors(cfg: RunConfig, n: int) -> list[str]:
    """The parts of a schedule other than sync that do not work in `n` processes."""
    schedule, n_prompts = cfg.schedule, cfg.data.prompts_per_step
    refused = [
        (schedule.order == "arrival", "schedule.order='arrival'", "schedule.order='prompt'"),
        (cfg.rollout.engines == "mesh", "rollout.engines='mesh'", "rollout.engines='process'"),
    ]
    errors = [
        f"config.{key} runs in one process, but there are {n}; set config.{remedy}"
        for found, key, remedy in refused
        if found
    ]
    if n_prompts < n and not schedule.rollout_workers:
        errors.append(
            f"config.data.prompts_per_step={n_prompts} is less than the {n} processes, each of "
            f"which generates for config.schedule.mode={schedule.mode!r}; set {n} or more"
        )
    return errors


def connect_to_workers(cfg: RunConfig) -> ModuleType | None:
    """Ray, connected to its cluster; None if the run has no rollout workers.

    Raises ValueError if Ray is absent or its cluster cannot be reached. Several processes need a
    cluster that runs; one starts it if there is none.
    """
    if not cfg.schedule.rollout_workers:
        return None
    user = f"config.schedule.rollout_workers={cfg.schedule.rollout_workers}"
    ray = import_ray(user, "set config.schedule.rollout_devices instead")
    try:
        connect(ray, "auto" if hosts.n_processes() > 1 else None)
    except ConnectionError as error:
        raise ValueError(
            f"{user}: no Ray cluster answers ({error}); set RAY_ADDRESS to that of `ray start`, or "
            "unset it, with which a run of one process starts a cluster on this host"
        ) from error
    return ray
