"""Experiment trackers: Weights & Biases, MLflow, SwanLab, ClearML and Trackio. Each is an extra."""

import dataclasses
import math
import os
import uuid
from pathlib import Path
from typing import Any

from jaxrl.tracking.packages import require_package
from jaxrl.tracking.samples import COLUMNS, sample_rows, samples_markdown, samples_name


@dataclasses.dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker logs."""

    folder: Path
    project: str
    name: str
    config: dict[str, Any]  # dotted key -> value
    resumed: bool
    n_samples: int  # logged per step

    def saved_id(self, file: str) -> str | None:
        """The tracker's id of a resumed run, from the run folder; None for a new run."""
        path = self.folder / file
        return path.read_text().strip() if self.resumed and path.is_file() else None

    def save_id(self, file: str, run_id: str) -> None:
        path = self.folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(run_id)


class WandbLogger:
    """Weights & Biases. WANDB_MODE=offline keeps everything in run_dir/wandb."""

    def __init__(self, run: TrackedRun):
        self._wandb = require_package("wandb", "wandb")
        self._run = self._wandb.init(
            project=run.project,
            name=run.name,
            dir=str(run.folder),
            config=run.config,
            id=run.saved_id("wandb/run_id"),
            resume="allow",
        )
        run.save_id("wandb/run_id", self._run.id)
        # wandb's internal step cannot decrease, which a resume needs
        self._run.define_metric("*", step_metric="step")
        self._n = run.n_samples

    def metrics(self, step: int, values: dict[str, float]) -> None:
        self._run.log({"step": step, **values})

    def samples(self, step: int, records: list[dict[str, Any]]) -> None:
        table = self._wandb.Table(columns=list(COLUMNS), data=sample_rows(records[: self._n]))
        self._run.log({"step": step, samples_name(records): table})

    def text(self, text: str) -> None:
        self._run.summary["text"] = text

    def close(self) -> None:
        self._run.finish()


class MlflowLogger:
    """MLflow at MLFLOW_TRACKING_URI."""

    def __init__(self, run: TrackedRun):
        # An unreachable server must not delay every step by minutes.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        self._mlflow = require_package("mlflow", "mlflow")
        self._mlflow.set_experiment(run.project)
        run_id = run.saved_id("mlflow_run_id")
        self._mlflow.end_run()  # a run that started, but whose parameters did not arrive
        started = self._mlflow.start_run(run_id=run_id, run_name=None if run_id else run.name)
        run.save_id("mlflow_run_id", started.info.run_id)
        if run_id is None:
            self._mlflow.log_params({key: str(value)[:500] for key, value in run.config.items()})
        self._n = run.n_samples

    def metrics(self, step: int, values: dict[str, float]) -> None:
        self._mlflow.log_metrics(values, step=step)

    def samples(self, step: int, records: list[dict[str, Any]]) -> None:
        text = samples_markdown(records[: self._n])
        self._mlflow.log_text(text, f"{samples_name(records)}_{step}.md")

    def text(self, text: str) -> None:
        self._mlflow.set_tag("text", text)

    def close(self) -> None:
        self._mlflow.end_run()


class SwanLabLogger:
    """SwanLab. SWANLAB_MODE=offline or local keeps everything in run_dir/swanlab."""

    def __init__(self, run: TrackedRun):
        self._swanlab = require_package("swanlab", "swanlab")
        run_id = run.saved_id("swanlab/run_id")
        self._run = self._swanlab.init(
            project=run.project,
            name=run.name,
            log_dir=str(run.folder / "swanlab"),
            config=run.config,
            id=run_id,
            resume="allow" if run_id else None,
        )
        run.save_id("swanlab/run_id", self._run.id)
        self._n = run.n_samples

    def metrics(self, step: int, values: dict[str, float]) -> None:
        self._run.log(finite(values), step=step)

    def samples(self, step: int, records: list[dict[str, Any]]) -> None:
        text = self._swanlab.Text(samples_markdown(records[: self._n]))
        self._run.log({samples_name(records): text}, step=step)

    def text(self, text: str) -> None:
        self._run.log({"text": self._swanlab.Text(text)}, step=0)

    def close(self) -> None:
        self._run.finish()


class ClearMLLogger:
    """ClearML at CLEARML_API_HOST. CLEARML_OFFLINE_MODE=1 keeps everything in ~/.clearml."""

    def __init__(self, run: TrackedRun):
        task = require_package("clearml", "clearml").Task
        task.set_random_seed(None)  # otherwise it seeds the generators of Python and NumPy
        run_id = run.saved_id("clearml_task_id")
        self._task = task.init(
            project_name=run.project,
            task_name=run.name,
            reuse_last_task_id=run_id or False,
            continue_last_task=0 if run_id else False,  # 0: steps keep their numbers
            output_uri=False,
            auto_connect_frameworks=False,
            auto_connect_arg_parser=False,
            auto_connect_streams=False,
        )
        run.save_id("clearml_task_id", self._task.id)
        self._task.set_parameters({key: str(value) for key, value in run.config.items()})
        self._logger, self._n = self._task.get_logger(), run.n_samples

    def metrics(self, step: int, values: dict[str, float]) -> None:
        for name, value in finite(values).items():  # NaN would arrive as 0
            title, _, series = name.partition("/")
            self._logger.report_scalar(title, series or title, value, iteration=step)

    def samples(self, step: int, records: list[dict[str, Any]]) -> None:
        text = samples_markdown(records[: self._n])
        self._logger.report_text(
            f"{samples_name(records)}, step {step}\n{text}", print_console=False
        )

    def text(self, text: str) -> None:
        self._logger.report_text(text, print_console=False)

    def close(self) -> None:
        self._task.close()


class TrackioLogger:
    """Trackio, in TRACKIO_DIR on this machine, or at TRACKIO_SERVER_URL or TRACKIO_SPACE_ID.

    A resumed run is found by its name, so the name ends with random digits.
    """

    def __init__(self, run: TrackedRun):
        self._trackio = require_package("trackio", "trackio")
        name = run.saved_id("trackio_run_name")
        self._run = self._trackio.init(
            project=run.project,
            name=name or f"{run.name}-{uuid.uuid4().hex[:6]}",
            config=run.config,
            resume="allow" if name else "never",
            embed=False,
        )
        run.save_id("trackio_run_name", self._run.name)
        self._n = run.n_samples

    def metrics(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)

    def samples(self, step: int, records: list[dict[str, Any]]) -> None:
        rows = sample_rows(records[: self._n])
        table = self._trackio.Table(columns=list(COLUMNS), data=rows)
        self._run.log({samples_name(records): table}, step=step)

    def text(self, text: str) -> None:
        self._run.log({"text": self._trackio.Markdown(text)}, step=0)

    def close(self) -> None:
        self._run.finish()


TRACKERS = {
    "wandb": WandbLogger,
    "mlflow": MlflowLogger,
    "swanlab": SwanLabLogger,
    "clearml": ClearMLLogger,
    "trackio": TrackioLogger,
}


def finite(values: dict[str, float]) -> dict[str, float]:
    """The values that are neither NaN nor infinite."""
    return {name: value for name, value in values.items() if math.isfinite(value)}
