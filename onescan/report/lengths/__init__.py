"""How well a language model tells a text in rows of several lengths: a page, and a table."""

from pathlib import Path

from onescan.evaluation.lengths import LengthScores
from onescan.report.lengths.page import lengths_table, render_lengths
from onescan.report.template import save

__all__ = ["lengths_table", "write_lengths"]


def write_lengths(scores: LengthScores, path: Path) -> Path:
    """Write a page that needs no other file: curves over lengths, and all numbers.

    Args:
        scores: as `measure_lengths` returned them.
        path: where to write; a page of onescan's that is there is replaced.

    Returns:
        The path.

    Raises:
        ValueError: at the path is something that is not a page of onescan's.
        OSError: the page cannot be written; one that was there is intact.
    """
    return save(render_lengths(scores), path)
