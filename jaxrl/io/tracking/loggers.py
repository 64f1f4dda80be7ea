"""Loggers of metrics and samples: one interface, and a fan-out that tolerates failing loggers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import rich
from rich.text import Text

from jaxrl.config.keys import LogConfig, RunConfig
from jaxrl.config.schema import flatten, to_dict
from jaxrl.io.tracking.console import ConsoleLogger
from jaxrl.io.tracking.json_lines import JsonlLogger
from jaxrl.io.tracking.trackers import MissingPackage, MlflowLogger, TensorBoardLogger, WandbLogger
from sharding.hosts import is_main_process

SERVICES = ("wandb", "mlflow")  # may be unreachable when a run starts


@runtime_checkable
class Logger(Protocol):
    def metrics(self, step: int, values: dict[str, float]) -> None:
        """Logs metrics of a step. Called more than once per step: validation is separate."""
        ...

    def samples(self, step: int, records: list[dict[str, Any]]) -> None:
        """Logs sampled completions, with the fields of samples.jsonl except the step."""
        ...

    def text(self, text: str) -> None:
        """Logs free text for the reader."""
        ...

    def close(self) -> None: ...


class Fanout:
    """Passes everything to all loggers; a failing one is reported once and retried each time."""

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
        if name not in self._warned:
            self._warned.add(name)
            warn(f"the logger {name!r} fails; the run continues without it", error)


def warn(message: str, error: Exception) -> None:
    """Prints a warning and the error in one line."""
    reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    rich.get_console().print(Text(f"warning: {message}: {reason}", "yellow"), soft_wrap=True)


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

    Raises ValueError for an unknown name or a package that is not installed. A service that cannot
    be reached is logged and skipped.
    """
    if not is_main_process():
        return Fanout({})
    run_dir = Path(run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    flat = flatten(to_dict(config))
    total = total_steps or config.total_steps
    factories: dict[str, Callable[[], Logger]] = {
        "console": lambda: ConsoleLogger(cfg, total),
        "jsonl": lambda: JsonlLogger(run_dir, resume_step),
        "tensorboard": lambda: TensorBoardLogger(cfg, run_dir, resume_step),
        "wandb": lambda: WandbLogger(cfg, run_dir, config.name, flat, resume_step),
        "mlflow": lambda: MlflowLogger(cfg, run_dir, config.name, flat, resume_step),
    }
    if unknown := [name for name in cfg.loggers if name not in factories]:
        raise ValueError(
            f"config.log.loggers has {unknown}; set names among {', '.join(factories)}"
        )
    loggers: dict[str, Logger] = {}
    for name in cfg.loggers:
        try:
            loggers[name] = factories[name]()
        except MissingPackage:
            raise
        except Exception as error:
            if name not in SERVICES:
                raise
            warn(f"the logger {name!r} does not start; the run continues without it", error)
    return Fanout(loggers)
