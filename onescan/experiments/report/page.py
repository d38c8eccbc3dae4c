"""Render self-contained HTML pages from one template, and write them to files."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from onescan.checkpoint.files import check_writable, write_atomically

MARK = b'<meta name="generator" content="onescan">'
HEAD = 1024  # number of bytes at the start of a page that contain the mark
COLORS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {  # name of the CSS variable: color in light mode, in dark mode
        "ink": ("#1b1f24", "#e6e9ed"),
        "muted": ("#5f6771", "#9ba5b0"),
        "line": ("#e1e5e9", "#30373f"),
        "surface": ("#ffffff", "#15181c"),
        "blue": ("#0072b2", "#55aee6"),
        "vermilion": ("#d55e00", "#f08a3c"),
        "green": ("#009e73", "#2fc79b"),
        "pink": ("#cc79a7", "#e6a3c8"),
        "amber": ("#d89000", "#f2b93c"),
        "sky": ("#56b4e9", "#93d2f7"),
    }
)
CONTROLS = dict.fromkeys((*range(32), *range(127, 160)), "\N{REPLACEMENT CHARACTER}")
CONTROLS |= {ord(space): space for space in "\t\n\r"}


class Figure(NamedTuple):
    """A picture or table with its title and caption.

    Attributes:
        title: A few words, as plain text.
        body: The picture or table.
        caption: One or two sentences that explain it, as plain text.
        columns: Number of the page's three columns that it needs.
    """

    title: str
    body: Markup
    caption: str
    columns: int = 1


class Section(NamedTuple):
    """A part of a page.

    Attributes:
        title: A few words.
        figures: Empty if the section does not apply; then `lead` gives the reason.
        lead: Introduction to the figures.
        folded: Whether the reader has to open it.
    """

    title: str
    figures: Sequence[Figure] = ()
    lead: str = ""
    folded: bool = False

    @property
    def anchor(self) -> str:
        """The `id` of the section, for links within the page."""
        return "".join(c if c.isalnum() else "-" for c in self.title.lower())

    @property
    def layout(self) -> list[tuple[Figure, str]]:
        """Each figure with the CSS class that sets its width; the rows of a page are full."""
        names = spans([figure.columns for figure in self.figures])
        return list(zip(self.figures, names, strict=True))


class Card(NamedTuple):
    """A number at the top of a page.

    Attributes:
        value: The number.
        label: Its name.
        note: What it refers to.
        spread: Its standard deviation, or empty.
    """

    value: str
    label: str
    note: str
    spread: str = ""


@dataclass(frozen=True, kw_only=True)
class Page:
    """A page; strings are escaped unless they are `Markup`."""

    kind: str
    """What it is about, above the title."""
    title: str
    lead: str
    cards: Sequence[Card] = ()
    table: str = ""
    note: str = ""
    """Explains the table."""
    facts: Sequence[tuple[str, str]] = ()
    sections: Sequence[Section]

    def html(self) -> str:
        """Render the page; control characters are replaced, because HTML does not allow them."""
        template = _environment().get_template("page.html")
        return template.render(vars(self)).translate(CONTROLS)

    def write(self, path: Path) -> Path:
        """Write the page, replacing an existing page of onescan.

        Returns:
            The path.

        Raises:
            ValueError: If the path holds something that onescan did not write.
            OSError: If the page cannot be written; an existing page stays intact.
        """
        check_report_path(path)
        page = self.html().encode(errors="replace")
        write_atomically(path, lambda partial: partial.write_bytes(page))
        return path


def fragment(macro: str, *args: Any, **kwargs: Any) -> Markup:
    """Render one macro of `macros.html`, such as a table for the body of a figure."""
    module: Any = _environment().get_template("macros.html").module
    html: Markup = getattr(module, macro)(*args, **kwargs)
    return html


def breakable(text: str) -> Markup:
    """Allow line breaks after underscores and slashes, where browsers do not break lines.

    >>> breakable("digits_lightnet/seed-0"), breakable("images/s")
    (Markup('digits_<wbr>lightnet/<wbr>seed-0'), Markup('images/s'))
    """
    return Markup(
        re.sub(r"(<[^>]*>)|([_/](?=\w\w))", lambda m: m[1] or f"{m[2]}<wbr>", escape(text))
    )


def best(text: str) -> Markup:
    """Mark a number as the best of its column or row."""
    return Markup('<b class="best">{}</b>').format(text)


def check_report_path(path: Path) -> None:
    """Check before a long training run that its report can be written.

    Raises:
        ValueError: If the path holds something that onescan did not write, or if nothing can be
            written to it.
    """
    check_writable("the path of the report", path)
    if path.exists() and not (path.is_file() and _is_ours(path)):
        raise ValueError(f"{path} was not written by onescan: choose another name")


def spans(columns: Sequence[int]) -> list[str]:
    """Choose the width of each figure, such that no row of a page has a gap.

    >>> spans([1, 1, 1, 1]), spans([2, 1, 1])
    (['half', 'half', 'half', 'half'], ['two-thirds', 'third', 'full'])
    """
    rows: list[list[int]] = []
    for width in columns:
        if rows and sum(rows[-1]) + width <= 3:  # noqa: PLR2004 - columns of a page
            rows[-1].append(width)
        else:
            rows.append([width])
    if rows[-2:] == [[1, 1, 1], [1]]:
        rows[-2:] = [[1, 1], [1, 1]]
    names = {1: "third", 2: "two-thirds", 3: "full"}
    stretched = {(1,): ["full"], (2,): ["full"], (1, 1): ["half", "half"]}
    return [
        name for row in rows for name in stretched.get(tuple(row), [names[each] for each in row])
    ]


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("onescan.experiments.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["colors"] = COLORS
    environment.filters["breakable"] = breakable
    return environment


def _is_ours(path: Path) -> bool:
    with path.open("rb") as page:
        return MARK in page.read(HEAD)
