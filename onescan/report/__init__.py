"""The HTML page people look at when a run is over."""

from onescan.report.page import check_report_path, write_report

__all__ = ["check_report_path", "write_report"]
