"""The folder of a run: its metrics, samples, report and export."""

import base64
import collections
import dataclasses
import html
import importlib.util
from pathlib import Path
from typing import Any

from jaxrl.report import write_report
from jaxrl.report.curve import curve_svg, finite
from jaxrl.report.record import read_record
from jaxrl.trainer.export import export_checkpoint

REPORT_HEIGHT = 900  # pixels


class RunFolder:
    """A run's folder. In a notebook it is shown as the curve of its rewards.

    `interrupted` is whether `train` returned before the last step, with the state saved.
    """

    def __init__(self, run_dir: str | Path, *, interrupted: bool = False):
        self.run_dir = Path(run_dir).expanduser()
        self.interrupted = interrupted

    def __repr__(self) -> str:
        return f"RunFolder({str(self.run_dir)!r}{', interrupted=True' * self.interrupted})"

    @property
    def metrics(self) -> Any:
        """All metrics, one row per step: a DataFrame if pandas is installed, else a list of dicts.

        A metric that a step has not is absent from its dict, NaN in the DataFrame.
        """
        rows: dict[int, dict[str, float]] = collections.defaultdict(dict)
        for name, points in read_record(self.run_dir).series.items():
            for step, value in points:
                rows[step][name] = value
        return _table([{"step": step} | rows[step] for step in sorted(rows)])

    @property
    def samples(self) -> Any:
        """All sampled responses with their rewards: a DataFrame, or a list of dicts."""
        return _table(read_record(self.run_dir).samples)

    def report(self) -> "InlineReport":
        """Writes report.html from the files of the folder; a notebook shows it."""
        return InlineReport(write_report(self.run_dir))

    def export(self, path: str | Path, *, step: int | str = "last", part: str = "policy") -> Path:
        """Writes a checkpoint as a Hugging Face folder and returns its path.

        `step` is a number, "last" or "best"; `part` is policy, adapter, ema or critic, as in
        `python -m jaxrl.convert`. Raises ValueError or CheckpointError if there is none.
        """
        target = Path(path).expanduser()
        export_checkpoint(self.run_dir, str(step), target, part=part)
        return target

    def _repr_html_(self) -> str | None:
        """The curve as a picture; None, for the plain text, before the first reward."""
        record = read_record(self.run_dir)
        if not any(finite(record.series.get(name, [])) for name in ("reward/mean", "val/reward")):
            return None
        # as a picture: the style of inline SVG would apply to the whole notebook
        data = base64.b64encode(curve_svg(record).encode()).decode()
        return f'<img alt="reward over steps" width="720" src="data:image/svg+xml;base64,{data}">'


@dataclasses.dataclass(frozen=True)
class InlineReport:
    """The report page of a run, which a notebook shows in a frame."""

    path: Path

    def _repr_html_(self) -> str:
        page = html.escape(self.path.read_text(encoding="utf-8"))
        style = f'width="100%" height="{REPORT_HEIGHT}" style="border:0"'
        return f'<iframe srcdoc="{page}" {style}></iframe>'


def _table(rows: list[dict[str, Any]]) -> Any:
    if importlib.util.find_spec("pandas") is None:
        return rows
    return importlib.import_module("pandas").DataFrame(rows)
