"""Experiment trackers: TensorBoard files, and Weights & Biases and MLflow, which are extras."""

import importlib
import math
import os
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from tensorboardX import summary
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import (  # protobuf makes these names when it is imported
    Event,  # pyright: ignore[reportAttributeAccessIssue]
    SessionLog,  # pyright: ignore[reportAttributeAccessIssue]
)
from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

from jaxrl.config.keys import LogConfig

COLUMNS = ("kind", "source", "prompt", "completion", "answer", "reward", "finish")


class MissingPackage(ValueError):
    """The package of a configured logger is not installed."""


def require_package(module: str, logger: str) -> ModuleType:
    """Imports a module. Raises MissingPackage with the extra to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingPackage(
            f"the logger {logger!r} needs the package {module}, which cannot be imported "
            f"({error}); install it with `uv sync --extra {logger}`, or remove {logger!r} from "
            "config.log.loggers"
        ) from error


def saved_run_id(path: Path, resume_step: int | None) -> str | None:
    """The tracker's id of a resumed run, from the run folder; None for a new run."""
    return path.read_text().strip() if resume_step is not None and path.is_file() else None


def event(step: int, content: Summary) -> Event:
    return Event(step=step, summary=content)


def sample_markdown(record: dict[str, Any]) -> str:
    """One sample as Markdown text."""
    head = f"reward {record.get('reward')}, answer {record.get('answer')}, {record.get('finish')}"
    quoted = (
        f"    {record.get(name)}".replace("\n", "\n    ") for name in ("prompt", "completion")
    )
    return "\n\n".join([head, *quoted])


class TensorBoardLogger:
    """Event files in run_dir/tensorboard. TensorBoard hides events after the resumed step.

    Events are written by the caller's thread: tensorboardX's writer thread dies silently when the
    disk is full, and later events would block forever.
    """

    def __init__(self, cfg: LogConfig, run_dir: Path, resume_step: int | None):
        self._folder = run_dir / "tensorboard"
        self._folder.mkdir(parents=True, exist_ok=True)
        if resume_step is None:
            for old in self._folder.glob("events.out.tfevents.*"):
                old.unlink()
        self._n = cfg.samples
        self._writer: EventsWriter | None = None
        if resume_step is not None:
            session = SessionLog(status=SessionLog.START)
            self._write(Event(step=resume_step + 1, session_log=session))

    def metrics(self, step: int, values: dict[str, float]) -> None:
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        self._write(*(event(step, summary.scalar(name, value)) for name, value in finite.items()))

    def samples(self, step: int, records: list[dict[str, Any]]) -> None:
        tags = {
            f"{record.get('kind', 'train')}/sample_{i}": sample_markdown(record)
            for i, record in enumerate(records[: self._n])
        }
        self._write(*(event(step, summary.text(tag, text)) for tag, text in tags.items()))

    def text(self, text: str) -> None:
        self._write(event(0, summary.text("text", text)))

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _write(self, *events: Event) -> None:
        """Starts a new file after a failure: readers stop at a truncated record."""
        if self._writer is None:
            suffix = f".{time.time_ns()}"  # file names have a resolution of one second
            self._writer = EventsWriter(str(self._folder / "events"), suffix)
        try:
            for one in events:
                one.wall_time = time.time()
                self._writer.write_event(one)
            self._writer.flush()
        except OSError:
            self._writer = None
            raise


class WandbLogger:
    """Weights & Biases. WANDB_MODE=offline keeps everything in run_dir/wandb."""

    def __init__(
        self,
        cfg: LogConfig,
        run_dir: Path,
        name: str,
        config: dict[str, Any],
        resume_step: int | None,
    ):
        self._wandb = require_package("wandb", "wandb")
        id_file = run_dir / "wandb" / "run_id"
        self._run = self._wandb.init(
            project=cfg.project,
            name=name,
            dir=str(run_dir),
            config=config,
            id=saved_run_id(id_file, resume_step),
            resume="allow",
        )
        id_file.parent.mkdir(parents=True, exist_ok=True)
        id_file.write_text(self._run.id)
        # wandb's internal step cannot decrease, which a resume needs
        self._run.define_metric("*", step_metric="step")
        self._n = cfg.samples

    def metrics(self, step: int, values: dict[str, float]) -> None:
        self._run.log({"step": step, **values})

    def samples(self, step: int, records: list[dict[str, Any]]) -> None:
        rows = [[record.get(name) for name in COLUMNS] for record in records[: self._n]]
        table = self._wandb.Table(columns=list(COLUMNS), data=rows)
        self._run.log({"step": step, f"samples/{records[0].get('kind', 'train')}": table})

    def text(self, text: str) -> None:
        self._run.summary["text"] = text

    def close(self) -> None:
        self._run.finish()


class MlflowLogger:
    """MLflow at MLFLOW_TRACKING_URI."""

    def __init__(
        self,
        cfg: LogConfig,
        run_dir: Path,
        name: str,
        config: dict[str, Any],
        resume_step: int | None,
    ):
        # An unreachable server must not delay every step by minutes.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        self._mlflow = require_package("mlflow", "mlflow")
        self._mlflow.set_experiment(cfg.project)
        id_file = run_dir / "mlflow_run_id"
        run_id = saved_run_id(id_file, resume_step)
        run = self._mlflow.start_run(run_id=run_id, run_name=None if run_id else name)
        id_file.write_text(run.info.run_id)
        if run_id is None:
            self._mlflow.log_params({key: str(value)[:500] for key, value in config.items()})
        self._n = cfg.samples

    def metrics(self, step: int, values: dict[str, float]) -> None:
        self._mlflow.log_metrics(values, step=step)

    def samples(self, step: int, records: list[dict[str, Any]]) -> None:
        text = "\n\n".join(sample_markdown(record) for record in records[: self._n])
        self._mlflow.log_text(text, f"samples/{records[0].get('kind', 'train')}_{step}.md")

    def text(self, text: str) -> None:
        self._mlflow.set_tag("text", text)

    def close(self) -> None:
        self._mlflow.end_run()
