"""The HTML pages people look at: about one recipe, about several, and about a model's forms."""

from onescan.report.comparison import comparison_table, write_comparison
from onescan.report.forms import write_forms
from onescan.report.page import write_report
from onescan.report.template import check_report_path

__all__ = [
    "check_report_path",
    "comparison_table",
    "write_comparison",
    "write_forms",
    "write_report",
]
