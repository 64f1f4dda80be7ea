"""Stage one of opening a run: the process group, the run folder and its lock, progress output."""

import contextlib
import dataclasses
import datetime
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import jax

from jaxrl.algorithms.user_rows import check_user_rows
from jaxrl.config.keys import RunConfig
from jaxrl.config.saved import blocking_differences, from_json, to_json
from jaxrl.replaced_file import replaced_file
from jaxrl.runtime.compilation import CompileWatch, open_cache
from jaxrl.runtime.folder_lock import FolderLock, lock_folder
from jaxrl.runtime.multihost import join
from jaxrl.runtime.ray_cluster import connect, import_ray
from jaxrl.runtime.signals import StopFlag
from jaxrl.runtime.versions import commit, versions
from jaxrl.tracking.json_lines import JsonLines
from jaxrl.tracking.loggers import check_loggers
from jaxrl.tracking.progress import Progress
from sharding import hosts

NEVER = sys.maxsize  # a step after all steps: every line is kept


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


@contextlib.contextmanager
def hold_folder(cfg: RunConfig, progress: Progress) -> Iterator[FolderLock | None]:
    """Creates cfg.run_path and holds its lock for the block. Only the main process locks.

    All processes raise ValueError if the folder cannot be created or another run holds it.
    """
    with contextlib.ExitStack() as stack:
        lock = None
        with hosts.raise_together():
            if hosts.is_main_process():
                make_folder(cfg.run_path)
                lock = stack.enter_context(lock_folder(cfg.run_path, progress))
        yield lock


def make_folder(folder: Path) -> None:
    """Creates the folder. Raises ValueError if that is not possible, or if files in it are links.

    A run would write through a link to the file that it names.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        file = next(path for path in (folder, *folder.parents) if path.exists())
        raise ValueError(
            f"config.run_dir is {folder}, but {file} is a file; set config.run_dir to a folder"
        ) from error
    except OSError as error:
        raise ValueError(
            f"the run folder {folder} cannot be created: {error.strerror}; set config.run_dir to a "
            "folder you can write to"
        ) from error
    if links := sorted(path.name for path in folder.iterdir() if _is_link_to_file(path)):
        raise ValueError(
            f"the run folder {folder} has links: {', '.join(links)}; a run would write to files "
            "elsewhere. Remove them, or set config.run_dir to another folder"
        )


def _is_link_to_file(path: Path) -> bool:
    """Whether a path is a link to a file or to nothing. Folders may be links."""
    return path.is_symlink() and not path.is_dir()


def open_folder(cfg: RunConfig) -> RunConfig:
    """Writes config.json into the run folder. Returns the config with data.today set.

    If the key is not set, it is the date of the run's first start. Other processes check that the
    file exists, and read the date from it.

    Raises ValueError if the folder has checkpoints of a run whose results this config would change.
    """
    path = cfg.run_path / "config.json"
    if not hosts.is_main_process():
        if not path.is_file():
            raise ValueError(
                f"the run folder {cfg.run_path.absolute()} of process 0 does not exist on this "
                "host; set config.run_dir to a folder on a disk that all hosts share"
            )
        return with_today(cfg, from_json(path.read_text()).data.today)
    if not any(cfg.run_path.glob("checkpoints/[0-9]*")) or not path.is_file():
        cfg = with_today(cfg, datetime.date.today().isoformat())
    else:
        old = from_json(path.read_text())
        cfg = with_today(cfg, old.data.today)
        if changes := blocking_differences(old, cfg):
            raise ValueError(
                f"{cfg.run_path} holds the checkpoints of another run; this one would change "
                f"{'; '.join(changes)}. Set config.run_dir to another folder, or "
                "undo the changes to resume"
            )
    with replaced_file(path) as file:
        file.write(to_json(cfg).encode())
    return cfg


def with_today(cfg: RunConfig, today: str) -> RunConfig:
    """The config with data.today = `today`, unless the key is set."""
    data = dataclasses.replace(cfg.data, today=cfg.data.today or today)
    return dataclasses.replace(cfg, data=data)


def record_start(folder: Path, resume_step: int | None) -> None:
    """Adds a line to starts.jsonl: when, on what, and with which versions this process starts.

    `resume_step` is the step of the checkpoint that the run resumes from; None is a new run, which
    overwrites the file of an earlier run in the folder.
    """
    if not hosts.is_main_process():
        return
    line = {
        "time": time.time(),
        "step": resume_step or 0,
        "host": socket.gethostname(),
        "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "processes": hosts.n_processes(),
        "commit": commit(),
        "versions": versions(),
    }
    starts = JsonLines(folder / "starts.jsonl", resume_step=None if resume_step is None else NEVER)
    starts.write(line)
    starts.close()
