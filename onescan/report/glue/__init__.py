"""Fine-tuning on tasks of GLUE: a table for the terminal, numbers for programs, and a page."""

from pathlib import Path

from onescan.report.glue.outcome import GlueOutcome, read_glue
from onescan.report.glue.page import render_glue
from onescan.report.glue.table import glue_table
from onescan.report.template import check_report_path, save
from onescan.training.folder import write_json

__all__ = ["GlueOutcome", "glue_table", "read_glue", "write_glue"]

SUMMARY, PAGE = "summary.json", "report.html"


def write_glue(outcome: GlueOutcome, folder: Path) -> Path:
    """Write summary.json and a page that needs no other file.

    Returns:
        The page's path.

    Raises:
        ValueError: at the page's path is something that onescan has not written.
        OSError: one cannot be written; what was there is intact.
    """
    check_report_path(folder / PAGE)
    write_json(folder / SUMMARY, outcome.to_dict())
    return save(render_glue(outcome), folder / PAGE)
