"""One self-contained HTML page about the finished runs of one recipe."""

from collections.abc import Sequence
from pathlib import Path

from onescan.report.sections import PAGES
from onescan.report.study import Study, read_study
from onescan.report.summary import summary
from onescan.report.template import check_report_path, fill, save
from onescan.training.config import RunResult


def write_report(runs: Sequence[Path | RunResult], path: Path) -> Path:
    """Write a page that needs no other file: numbers, curves, pictures, what was learnt.

    Args:
        runs: finished runs of one recipe, as folders or as `train` returned them. They may
            differ in their seed and in what they ran on; what only one model can show is shown
            of the first.
        path: where to write; a page of onescan's that is there is replaced.

    Returns:
        The path.

    Raises:
        ValueError: a run is not finished, the runs are not seeds of one recipe, their data has
            changed, nobody has said what to show of their task, or at the path is something else.
        OSError: the page cannot be written; one that was there is intact.
    """
    check_report_path(path)
    return save(render_page(read_study(runs)), path)


def render_page(study: Study) -> str:
    """Spell the page in HTML.

    Raises:
        ValueError: nobody has said what to show of the runs' task.
    """
    task = type(study.config.task)
    if task not in PAGES:
        known = ", ".join(config.__name__ for config in PAGES)
        raise ValueError(f"there is no report for task {task.__name__}; there are: {known}")
    return fill(
        kind="training report",
        title=study.config.name,
        lead=PAGES[task].lead(study),
        summary=summary(study),
        sections=[make(study) for make in PAGES[task].sections],
    )
