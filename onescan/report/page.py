"""One self-contained HTML page about the finished runs of one recipe."""

from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

from onescan.report.section import Section, anchor, render
from onescan.report.sections import PAGES
from onescan.report.study import Study, read_study
from onescan.report.summary import summary
from onescan.training.files import write_atomically
from onescan.training.run import RunResult

MARK = b'<meta name="generator" content="onescan">'
HEAD = 1024  # bytes of a page, among which the mark is


def write_report(runs: Sequence[Path | RunResult], path: Path) -> Path:
    """Write a page that needs no other file: numbers, curves, pictures, what was learnt.

    Args:
        runs: finished runs of one recipe, as folders or as `train` returned them. They may
            differ in nothing but their seed; what only one model can show is shown of the first.
        path: where to write; a page of onescan's that is there is replaced.

    Returns:
        The path.

    Raises:
        ValueError: a run is not finished, the runs are not seeds of one recipe, their data has
            changed, nobody has said what to show of their task, or at the path is something else.
        OSError: the page cannot be written; one that was there is intact.
    """
    check_report_path(path)
    html = render_page(read_study(runs))
    write_atomically(path, lambda partial: partial.write_text(html, encoding="utf-8"))
    return path


def check_report_path(path: Path) -> None:
    """Raise ValueError where a report would replace what is none: to know before hours of training.

    Raises:
        ValueError: at the path is something that `write_report` has not written.
    """
    if path.exists() and not (path.is_file() and _is_report(path)):
        raise ValueError(f"{path} was not written by onescan: remove it, or choose another folder")


def _is_report(path: Path) -> bool:
    with path.open("rb") as page:
        return MARK in page.read(HEAD)


def render_page(study: Study) -> str:
    """Spell the page in HTML.

    Raises:
        ValueError: nobody has said what to show of the runs' task.
    """
    task = type(study.config.task)
    if task not in PAGES:
        known = ", ".join(config.__name__ for config in PAGES)
        raise ValueError(f"there is no report for task {task.__name__}; there are: {known}")
    sections = [make(study) for make in PAGES[task].sections]
    shown = [section for section in sections if section.figures]
    left_out = [section for section in sections if not section.figures]
    template = Template(files("onescan.report").joinpath("page.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=escape(study.config.name),
        lead=escape(PAGES[task].lead(study)),
        links=_links(shown),
        summary=summary(study),
        sections="\n".join(render(section) for section in [*shown, *left_out]),
    )


def _links(sections: Sequence[Section]) -> str:
    return "".join(
        f'<a href="#{anchor(section)}">{escape(section.title)}</a>' for section in sections
    )
