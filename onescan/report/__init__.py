"""The HTML pages people look at: one recipe, several, generated images, lengths and memory."""

from onescan.report.comparison import comparison_table, write_comparison
from onescan.report.generation import generation_table, write_generation
from onescan.report.glue import glue_table, read_glue, write_glue
from onescan.report.lengths import lengths_table, write_lengths
from onescan.report.needle import needle_table, write_needles
from onescan.report.page import write_report
from onescan.report.template import check_report_path

__all__ = [
    "check_report_path",
    "comparison_table",
    "generation_table",
    "glue_table",
    "lengths_table",
    "needle_table",
    "read_glue",
    "write_comparison",
    "write_generation",
    "write_glue",
    "write_lengths",
    "write_needles",
    "write_report",
]
