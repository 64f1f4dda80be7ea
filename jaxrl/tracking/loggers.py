"""The loggers of a run, and a fan-out that tolerates failing loggers."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxrl.config.disk import is_full
from jaxrl.config.keys import LogConfig, RunConfig
from jaxrl.config.schema import flatten, to_dict
from jaxrl.tracking.console import ConsoleLogger
from jaxrl.tracking.json_lines import JsonlLogger
from jaxrl.tracking.logger import Logger, warn
from jaxrl.tracking.packages import check_package
from jaxrl.tracking.prometheus import PrometheusLogger, check_port
from jaxrl.tracking.service import TrackingService
from jaxrl.tracking.tensorboard import TensorBoardLogger
from jaxrl.tracking.trackers import TRACKERS, TrackedRun
from sharding.hosts import is_main_process


class Fanout:
    """Passes everything to all loggers; a failing one is reported once and retried each time.

    A full disk is reported once for all of them.
    """

    def __init__(self, loggers: dict[str, Logger]):
        self.loggers = loggers
        self._warned: set[str] = set()

    def metrics(self, step: int, values: dict[str, float]) -> None:
        values = {name: float(value) for name, value in values.items()}
        self._each(lambda logger: logger.metrics(step, values))

    def samples(self, step: int, records: list[dict[str, Any]]) -> None:
        if records:
            self._each(lambda logger: logger.samples(step, records))

    def text(self, text: str) -> None:
        self._each(lambda logger: logger.text(text))

    def close(self) -> None:
        self._each(lambda logger: logger.close())

    def _each(self, call: Callable[[Logger], None]) -> None:
        for name, logger in self.loggers.items():
            try:
                call(logger)
            except Exception as error:  # foreign services and full disks
                self._warn(name, error)

    def _warn(self, name: str, error: Exception) -> None:
        message = (
            "the disk is full; the run continues, and its loggers try again at every step"
            if is_full(error)
            else f"the logger {name!r} fails; the run continues without it"
        )
        if message not in self._warned:
            self._warned.add(message)
            warn(message, error)


def check_loggers(cfg: LogConfig) -> None:
    """Checks before the devices are opened that the loggers of `cfg` can start.

    Raises ValueError if a package is not installed or the port of the metrics is in use.
    """
    if not is_main_process():
        return
    for name in cfg.loggers:
        if name in TRACKERS:
            check_package(name, name)
    if cfg.prometheus_port:
        check_package("prometheus_client", "prometheus")
        check_port(cfg.prometheus_host, cfg.prometheus_port)


def make_loggers(
    cfg: LogConfig,
    run_dir: Path,
    config: RunConfig,
    resume_step: int | None,
    *,
    total_steps: int = 0,
) -> Logger:
    """The loggers named in `cfg.loggers`; none in processes other than the main process.

    `resume_step` is the step of the checkpoint that the run resumes from; later records are
    dropped. None is a new run, which overwrites the files of an earlier run in the folder.

    Raises ValueError for an unknown name or a package that is not installed. A tracker that cannot
    be reached does not stop the run (`Service`).
    """
    if not is_main_process():
        return Fanout({})
    run_dir = Path(run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    total = total_steps or config.total_steps
    run = TrackedRun(
        folder=run_dir,
        project=cfg.project,
        name=config.name,
        config=flatten(to_dict(config)),
        resumed=resume_step is not None,
        n_samples=cfg.samples,
    )
    factories: dict[str, Callable[[], Logger]] = {
        "console": lambda: ConsoleLogger(cfg, total),
        "jsonl": lambda: JsonlLogger(run_dir, resume_step),
        "tensorboard": lambda: TensorBoardLogger(cfg, run_dir, resume_step),
        **{
            name: functools.partial(TrackingService, name, functools.partial(start, run), run_dir)
            for name, start in TRACKERS.items()
        },
    }
    if unknown := [name for name in cfg.loggers if name not in factories]:
        raise ValueError(
            f"config.log.loggers has {unknown}; set names among {', '.join(factories)}"
        )
    loggers = {name: factories[name]() for name in cfg.loggers}
    if cfg.prometheus_port:
        loggers["prometheus"] = PrometheusLogger(cfg, config.name, total)
    return Fanout(loggers)
