"""HTML pages about runs and evaluations, and the same numbers as text for a terminal.

The module of a page is imported when its function is first used.
"""

from typing import TYPE_CHECKING

from onescan.lazy import lazy_attributes

if TYPE_CHECKING:
    from onescan.experiments.report.comparison import comparison_table as comparison_table
    from onescan.experiments.report.comparison import write_comparison as write_comparison
    from onescan.experiments.report.generation import generation_table as generation_table
    from onescan.experiments.report.generation import write_generation as write_generation
    from onescan.experiments.report.glue import glue_table as glue_table
    from onescan.experiments.report.glue import read_glue as read_glue
    from onescan.experiments.report.glue import write_glue as write_glue
    from onescan.experiments.report.lengths import lengths_table as lengths_table
    from onescan.experiments.report.lengths import write_lengths as write_lengths
    from onescan.experiments.report.needle import needle_table as needle_table
    from onescan.experiments.report.needle import write_needles as write_needles
    from onescan.experiments.report.page import check_report_path as check_report_path
    from onescan.experiments.report.run import write_report as write_report

_MODULES = {
    "check_report_path": "page",
    "comparison_table": "comparison",
    "generation_table": "generation",
    "glue_table": "glue",
    "lengths_table": "lengths",
    "needle_table": "needle",
    "read_glue": "glue",
    "write_comparison": "comparison",
    "write_generation": "generation",
    "write_glue": "glue",
    "write_lengths": "lengths",
    "write_needles": "needle",
    "write_report": "run",
}
__all__ = [*_MODULES]
__getattr__ = lazy_attributes(__name__, _MODULES)
