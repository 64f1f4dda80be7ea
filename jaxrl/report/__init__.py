"""The report of a run: one HTML file that shows what it learned, and needs nothing but a browser."""

from jaxrl.report.page import write_report

__all__ = ["write_report"]
