"""The frame of every page of onescan's, and the file it goes to."""

from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

from onescan.checkpoint.files import write_atomically
from onescan.report.section import Section, anchor, render

MARK = b'<meta name="generator" content="onescan">'
HEAD = 1024  # bytes of a page, among which the mark is


def fill(*, kind: str, title: str, lead: str, summary: str, sections: Sequence[Section]) -> str:
    """Spell a page in HTML; sections that do not apply come last.

    Args:
        kind: what page it is.
        title: what it is about.
        lead: a few sentences for a stranger; these three are plain text.
        summary: the head of the page, in HTML.
        sections: the rest of it.
    """
    shown = [section for section in sections if section.figures]
    left_out = [section for section in sections if not section.figures]
    links = (f'<a href="#{anchor(each)}">{escape(each.title)}</a>' for each in shown)
    template = Template(files("onescan.report").joinpath("page.html").read_text(encoding="utf-8"))
    return template.substitute(
        kind=escape(kind),
        title=escape(title),
        lead=escape(lead),
        links="".join(links),
        summary=summary,
        sections="\n".join(render(section) for section in [*shown, *left_out]),
    )


def save(html: str, path: Path) -> Path:
    """Write a page; one of onescan's that is there is replaced.

    Raises:
        ValueError: at the path is something else.
        OSError: the page cannot be written; one that was there is intact.
    """
    check_report_path(path)
    write_atomically(path, lambda partial: partial.write_text(html, encoding="utf-8"))
    return path


def check_report_path(path: Path) -> None:
    """Raise ValueError where a page would replace what is none: to know before hours of training.

    Raises:
        ValueError: at the path is something that onescan has not written, or its folder is a file.
    """
    foreign = f"{path} was not written by onescan"
    if path.is_dir():
        raise ValueError(f"{foreign}: it is a folder, expected a file's name")
    for parent in path.parents:
        if parent.exists() and not parent.is_dir():
            raise ValueError(f"{path} cannot be written: {parent} is a file, expected a folder")
    if path.exists() and not (path.is_file() and _is_ours(path)):
        raise ValueError(f"{foreign}: choose another name")


def _is_ours(path: Path) -> bool:
    with path.open("rb") as page:
        return MARK in page.read(HEAD)
