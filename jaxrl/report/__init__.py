"""The report of a run: one self-contained HTML file with its curves, samples and config."""

from jaxrl.report.page import write_report

__all__ = ["write_report"]
