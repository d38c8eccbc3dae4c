"""The HTML page people look at when a run is over."""

from onescan.report.page import write_report

__all__ = ["write_report"]
