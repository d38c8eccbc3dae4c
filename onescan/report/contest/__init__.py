"""Contestants side by side, as a page and as a table: time, memory and ratios over sizes."""

from pathlib import Path

from onescan.bench.contest.outcome import Results
from onescan.bench.contests import Contest
from onescan.report.contest.page import render_contest
from onescan.report.contest.table import contest_table
from onescan.report.template import save

__all__ = ["contest_table", "write_contest"]


def write_contest(results: Results, contest: Contest, path: Path) -> Path:
    """Write a page that needs no other file: time and memory over sizes, and all numbers.

    Args:
        results: as `run_contest` returned them, or gave them before its end.
        contest: what the benchmark is about.
        path: where to write; a page of onescan's that is there is replaced.

    Returns:
        The path.

    Raises:
        ValueError: at the path is something that is not a page of onescan's.
        OSError: the page cannot be written; one that was there is intact.
    """
    return save(render_contest(results, contest), path)
