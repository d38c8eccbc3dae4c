"""The HTML pages people look at when runs are over: about one recipe, and about several."""

from onescan.report.comparison import comparison_table, write_comparison
from onescan.report.page import write_report
from onescan.report.template import check_report_path

__all__ = ["check_report_path", "comparison_table", "write_comparison", "write_report"]
