"""Finished runs of several recipes side by side: a table for the terminal, and a page."""

from collections.abc import Sequence
from pathlib import Path

from onescan.report.comparison.groups import read_groups
from onescan.report.comparison.page import render_comparison
from onescan.report.comparison.settings import caution
from onescan.report.comparison.table import plain_table
from onescan.report.template import check_report_path, save


def comparison_table(runs: Sequence[Path]) -> str:
    """Set finished runs side by side as plain text, one line for each recipe.

    A last line says so where they learnt from different data.

    Args:
        runs: folders of finished runs, or folders with seed-* folders of such below them. Runs
            that differ only in their seed and in what they ran on are one line; where a seed comes
            twice, each machine has its own.

    Raises:
        ValueError: a folder holds no run, a run is not finished, two are the same run on the
            same machine, or they are of different tasks.
    """
    groups = read_groups(runs)
    said = [plain_table(groups), caution([group.config for group in groups])]
    return "\n".join(filter(None, said))


def write_comparison(runs: Sequence[Path], path: Path) -> Path:
    """Write a page that needs no other file: the table, curves, and where the settings differ.

    Args:
        runs: as for `comparison_table`.
        path: where to write; a page of onescan's that is there is replaced.

    Returns:
        The path.

    Raises:
        ValueError: as `comparison_table`; or at the path is something else.
        OSError: the page cannot be written; one that was there is intact.
    """
    check_report_path(path)
    return save(render_comparison(read_groups(runs)), path)
